"""Evaluation of tables: `scores` of one split, `cells` of a table of results, and how cells are filled and shown.

`stacked` trains all splits of a set as one stack that can be killed and resumed, `estimators` fits one estimator per
split, `reproduction` fills cells, `tables` and `figures` show them.
"""

from marigold_uq.evaluation.tabular.cells import Cell, CellKey, CellStore
from marigold_uq.evaluation.tabular.scores import Spread, score_rows, summarize_splits

__all__ = ["Cell", "CellKey", "CellStore", "Spread", "score_rows", "summarize_splits"]
