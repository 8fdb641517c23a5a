"""The subcommands of `marigold-uq`, one file each: a frozen dataclass of options and a function that runs it."""
