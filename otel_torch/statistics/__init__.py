"""Statistics of tensors, by way of one row of numbers per tensor.

1. `measure.measure` reduces a tensor to a row as soon as the tensor exists. A row on an
   accelerator stays there.
2. `row_layout` lists the columns of a row.
3. `read_rows.RowTransfer` brings the rows of a step to the host, with one copy per device.
4. `table.derive` computes the named statistics from a row. `table.DEFINITIONS` is where a
   statistic is added.

>>> import torch
>>> from otel_torch.statistics.measure import measure
>>> from otel_torch.statistics.read_rows import read_rows
>>> from otel_torch.statistics.row_layout import SCALARS
>>> from otel_torch.statistics.table import derive
>>> measurement = measure(torch.tensor([1.0, 2.0, -3.0]))
>>> [row] = read_rows([measurement])
>>> dict(zip(SCALARS, row))["squares"], len(row)
(14.0, 7)
>>> derive(["mean", "max", "shape"], row, measurement)
{'mean': 0.0, 'max': 2.0, 'shape': [3]}
"""
