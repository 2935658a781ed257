"""What a verb's call does on each rank.

`fit` makes epochs, `evaluate` and `predict` a pass, `on_batch` a batch. In the order of a batch:
`fit_data` reads it, `passes` has the only loop, `fit_learning` made the `step` that computes it
(`own_step` by a model's own hooks) and the `update` that learns from it (`weighing`, `applier`),
and `log` keeps its values. `validations` are passes within a fit, `snapshot` is what files have.
"""
