"""One module per task, each holding its `Task` constant; conf/task/ has the yaml of the same name."""
