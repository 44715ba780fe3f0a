"""The parts of gpu_suite.py: what each measures, how it is timed, and the report.

gpu_suite.py   starts each part as a process of its own, under a time limit
registry       the parts in order of their value, with estimates
bench          what a part is given: engines, sizes, ceilings, the log
decode, streaming, fenced, slowdown, context, batch, host, start, experts, peers, correctness, ceilings   the parts
log            measurements, one line of JSON each, on the disk before the next one begins
report         report.json and report.md from such lines, of one run or of several
"""
