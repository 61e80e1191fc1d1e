"""Benchmark logs: the printed tables and blocks of ring-attention systems, read into rows whose arithmetic is audited.

In the order in which a log goes through them:

    rows        what a log says and what the audit says of it, as values
    cells       numbers, lengths and names as logs print them
    prose       what stands beside tables: results printed line by line, and settings
    pipes       rows of tables whose cells stand between bars
    read        a whole log: every row with the settings that hold for it
    rates       each row's TFLOP/s computed again, and the verdict on them
    sections    what is odd about a table or a row, whatever its settings
    audit       all of it together, and rows of several logs against one another
    show        the audit as text, JSON and CSV
    logs        `ringprof.logs`: the room's door
"""
