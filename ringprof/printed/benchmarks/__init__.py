"""Reader and audit of benchmark logs: printed tables and blocks of ring-attention systems, as rows with verdicts.

Modules, in the order in which a log passes through them:

    rows    the contents of a log and the results of the audit, as values
    pipes   parser of tables whose cells are separated by bars
    read    reader of a whole log: every row with the settings that apply to it, and the text outside tables
    audit   recomputation of each row's TFLOP/s, findings about rows and tables, and comparisons between several logs
    logs    `ringprof.logs`, the package's public entry point: the audit as text, JSON and CSV
"""
