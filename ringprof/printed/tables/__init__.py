"""Reader and analysis of the kernel tables that torch, ``nsys stats`` and nvprof print.

Modules, in the order in which a log passes through them:

    rows             the contents of a table, as values
    layout           the position of a table among other lines, its line prefix, its columns and their cells
    read             parsers of torch's tables and of the summaries of nsys and nvprof; the text around them
    kernels          selection of the rows that are kernels, their kinds, and the number of iterations that they hold
    analyse          time by kind, bounds on overlap, and a check of the shares that the log's author printed
    table_analysis   `ringprof.load_tables`, the package's public entry point: text, JSON, figures, measurements
"""
