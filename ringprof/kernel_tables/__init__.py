"""Printed kernel tables: what torch, ``nsys stats`` and nvprof print of a profile, read, added up and judged.

In the order in which a log goes through them:

    rows             what a table says, as values
    layout           where a table stands among other lines, its prefix, its columns and their cells
    torch_tables     rows of torch's tables
    nvidia_tables    rows of nsys's summaries and of nvprof's
    read             every table of a log, and what the text around it says
    kernels          which rows are kernels, and of what kind
    iterations       how many iterations the rows hold
    stated_shares    shares that the log's author printed, checked
    analyse          time by kind, and what it proves about overlap
    show             the report as text and JSON, its figures, and entries of a comparison
    table_analysis   what `ringprof.load_tables` returns: the room's door
"""
