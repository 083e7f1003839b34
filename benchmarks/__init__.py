"""What fxsplit is worth, beside its peers in the same run: ``python -m benchmarks`` makes the tables of the documentation.

A file is a claim: its question, the minutes it may take, and ``measure``, which returns one table (`report.Report`).

What the claims share, in the order in which it is used:

- `tasks`: models and batches;
- `variants`, `peers`, `processes`: the ways to do a step of one of them, by fxsplit and by others;
- `measuring`: rounds in which variants take turns, and what is said of them;
- `children`: fresh interpreters; `live_bytes`: what tensors are alive; `cuts`: what is needed to judge a cut;
- `machine`: where the figures are from; `report`: a table, and its place in a page;
- `part`: one claim in this process; `__main__`: all of them.
"""
