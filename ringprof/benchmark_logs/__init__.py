"""Reader and audit of benchmark logs: printed tables and blocks of ring-attention systems, as rows with verdicts.

Modules, in the order in which a log passes through them:

    rows        the contents of a log and the results of the audit, as values
    cells       parsers of printed numbers, lengths and names
    free_text   parser of the text outside tables: results printed line by line, and settings
    pipes       parser of tables whose cells are separated by bars
    read        reader of a whole log: every row with the settings that apply to it
    rates       recomputation of each row's TFLOP/s, and the verdict on it
    sections    findings about a table or a row that need no settings
    audit       the whole audit, with comparisons between several logs
    show        the audit as text, JSON and CSV
    logs        `ringprof.logs`, the package's public entry point
"""
