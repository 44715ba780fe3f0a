"""The parts of gpu_suite.py: what each measures, how it is timed, and the report.

gpu_suite.py   starts each part as a process of its own, under a time limit
registry       the parts in order of their value, with estimates
wheels         packages for a machine without an index
bench          what a part is given: engines, sizes, ceilings, the log; fitting says how many layers have room
machine, ceilings, decode, streaming, fenced, slowdown, context, batch, host, start, experts   the parts that measure
correctness    the parts that are tests, run by processes with the plugin pytest_lines
peers          graphcore beside other engines: transformers_peer, gpt_fast_peer, which answer as peer_answers says
tools          NVIDIA's sanitizer and profiler over tool_step
log            measurements, one line of JSON each, on the disk before the next one begins
report         report.json and report.md from such lines, of one run or of several
"""
