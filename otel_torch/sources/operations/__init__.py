"""Records the graph of operations (OTEL_TORCH_CAPTURE=graph): each operation with what it reads and
makes.

A module's output shows which module is wrong, but not which of its lines, and shows nothing of the
code outside of modules. Torch's dispatcher shows every operation of the program.

    RunEvents -> source.GraphCapture            selects steps, enters and leaves the mode
              -> dispatch_mode.GraphMode        sees each operation
              -> program_values.ProgramValues   which value a tensor is now
              -> graph_rows.GraphRow            a row of the recording
"""
