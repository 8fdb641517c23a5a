"""The subcommands of `marigold-uq`: a frozen dataclass of options and a function that runs it, one file each."""
