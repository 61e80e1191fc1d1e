"""Reader and analysis of the kernel tables that torch, ``nsys stats`` and nvprof print.

Modules, in the order in which a log passes through them:

    rows             the contents of a table, as values
    layout           the position of a table among other lines, its line prefix, its columns and their cells
    torch_tables     parser of torch's tables
    nvidia_tables    parser of the summaries of nsys and nvprof
    read             reader of all tables in a log, and of the text around them
    kernels          selection of the rows that are kernels, and their kinds
    iterations       number of iterations that the rows hold
    analyse          time by kind, bounds on overlap, and a check of the shares that the log's author printed
    table_analysis   `ringprof.load_tables`, the package's public entry point: text, JSON, figures, measurements
"""
