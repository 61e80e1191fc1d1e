"""Print the table of traces/README.md from the run.json files themselves."""

from __future__ import annotations

from pathlib import Path

from ringprof.run import read_run

TRACES = Path(__file__).resolve().parent.parent / "traces"


def main() -> None:
    print("| folder | ranks | command |\n| --- | --- | --- |")
    for path in sorted([*TRACES.glob("cpu*/run.json"), *TRACES.glob("h[12]00*/run.json")]):
        run = read_run(path)
        where = f"{run.topology.world_size} x {run.environment.devices[0]}"
        hosts = ""
        if run.topology.ranks_per_host < run.topology.world_size:
            hosts = ", two hosts" if len(set(run.topology.hosts)) > 1 else ", two emulated hosts"
        print(f"| `{path.parent.name}` | {where}{hosts} | `{' '.join(run.command)}` |")


if __name__ == "__main__":
    main()
