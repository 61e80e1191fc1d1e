"""Reader and analysis of the communication logs of production jobs: Flight Recorder dumps, NCCL Inspector files.

Modules, in the order in which a folder passes through them:

    operations        the content of one rank's log, as values
    pickle_values     decoder of pickles that hold plain values only
    flight_recorder   reader of the dumps of PyTorch's Flight Recorder
    nccl_inspector    reader of the lines of NCCL's Inspector plugin
    read              which files of a folder are such logs, and the reader of all ranks' files
    match             which operations of different ranks belong together
    analyse           bounds, figures per rank and per size, who came late, and where the ranks stand in a hang
    comm_log_report   `CommLogAnalysis`, the package's public result: text, JSON, figures
"""
