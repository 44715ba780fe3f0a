"""What same_answers.py asks graphcore, by part, and what becomes of the answers.

cases          one question with a name; its answer is a record of plain values; groups of them run in processes
checkpoints    the small models that are asked, made once in the work folder
records        values that are the same in every run of the same code, as JSON has them
models         every family, graph kind, streaming, dtype and kv_dtype
sequences      requests beside one another, too few pages, saved caches, states, transformers' generate
lines          command lines, right ones and wrong ones
commands       runs them
differences    what two files of answers have not in common
"""
