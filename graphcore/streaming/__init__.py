"""Movement of weights while a program runs: policies that decide when, and the code that moves the bytes."""
