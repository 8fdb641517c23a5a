"""Print the lower bounds of the installed package and of its tests as constraints for pip, `name==1.2`."""

import re
from importlib.metadata import requires


def lower_bounds(requirements: list[str], extra: str = "test") -> list[str]:
    """Requirements without an extra, and those of one."""
    wanted = [text for text in requirements if "extra ==" not in text or f'extra == "{extra}"' in text]
    found = {}
    for text in wanted:
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?[^;]*?>=\s*([\w.]+)", text)
        if match:
            found[match[1]] = match[2]
    return [f"{name}=={version}" for name, version in sorted(found.items())]


if __name__ == "__main__":
    print("\n".join(lower_bounds(requires("marigold_uq") or [])))
