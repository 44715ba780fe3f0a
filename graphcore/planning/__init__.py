"""Planning of memory before anything is allocated: sizes, costs, placements, the machine, the plan."""
