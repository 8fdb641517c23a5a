"""Copy a region, variables, hours and years of a weather record into a local zarr store. Run it again to resume.

python scripts/prepare_weather.py --config configs/field/t2m_data.yaml --dry_run true
python scripts/prepare_weather.py --config configs/field/t2m_data.yaml

See docs/fields.md, "Weather at full size".
"""

import sys
from collections.abc import Sequence

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.field.data.preparation import WeatherCopy, estimate, prepare_weather


def run(options: WeatherCopy, invocation: Invocation) -> int:
    """Say what it takes, then copy."""
    print(estimate(options))
    if not options.dry_run:
        print(f"written: {prepare_weather(options)}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, estimate, copy."""
    return run_command("scripts/prepare_weather.py", WeatherCopy, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
