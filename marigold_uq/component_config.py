"""Config entries of diffusers components that change after construction."""

from typing import Any


def store_in_config(component: Any, **values: Any) -> None:
    """Change entries of a component's config so that saving, loading and `from_config` all keep them.

    diffusers lists the arguments that were left at their default in `_use_default_values`, and `from_config` skips
    whatever is listed: an entry that is changed later must leave the list, or it silently falls back to the default.
    """
    defaults = [name for name in component.config.get("_use_default_values", ()) if name not in values]
    component.register_to_config(**values, _use_default_values=defaults)
