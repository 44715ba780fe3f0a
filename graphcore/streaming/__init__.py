"""When bytes move: policies, and the scheduler that runs a program under one."""
