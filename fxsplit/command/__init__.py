"""The command line: ``fxsplit``, or ``python -m fxsplit``.

options   the fields of a plan as options
model     MODEL and --input: what is to be split, and one call of it
draw      the stages as a graph, DOT or SVG
commands  the words after ``fxsplit``: demo, and those of compiling, planning and explaining
"""
