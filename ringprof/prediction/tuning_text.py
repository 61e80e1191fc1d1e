"""The outcome of a tuning as text."""

from __future__ import annotations

from ringprof.common.formatting import significant
from ringprof.prediction.tune import Trial, Tuning
from ringprof.report.tables import Column, text_table
from ringprof.report.text import TextStyle, clean

_COLUMNS = (
    Column("strategy"), Column("ms"), Column("over the fastest\n(95 % interval)"), Column("recordings"),
    Column("predicted ms\n(80 % interval)"), Column("", left=True),
)  # fmt: skip


def tuning_text(tuning: Tuning, style: TextStyle) -> str:
    """Return all trials as a table, and the verdict, ending with a newline."""
    query = tuning.trials[0].query
    workload = query.workload
    head = (
        f"{workload.seq} tokens, {workload.heads} heads ({workload.kv_heads} kv) of {workload.head_dim}"
        f" on {query.cluster.size} ranks ({clean(tuning.device)}), kernel {query.kernel}"
    )
    table = text_table(_COLUMNS, [_row(trial) for trial in tuning.trials], style)
    tail = [clean(tuning.verdict())]
    if tuning.stopped_by != "decided":
        tail.append(f"stopped by --{tuning.stopped_by}")
    return style.finish(style.fit(head) + "\n\n" + table + "\n" + style.fit("\n".join(tail)))


def _row(trial: Trial) -> list[str]:
    slower = trial.slower
    forecast = "" if trial.forecast is None else "{1} ({0} to {2})".format(
        *(significant(time, 3) for time in trial.forecast.prediction.interval_ms)
    )  # fmt: skip
    note = "" if trial.failure is None else f"failed: {clean(trial.failure, 60)}"
    note = f"dropped after round {trial.dropped_after}" if trial.dropped_after else note
    return [
        clean(trial.label), "" if trial.median_ns is None else significant(trial.median_ns / 1e6),
        "" if slower is None else f"{100 * slower[0] - 100:+.2f} to {100 * slower[1] - 100:+.2f} %",
        str(len(trial.recordings_ns)), forecast, note,
    ]  # fmt: skip
