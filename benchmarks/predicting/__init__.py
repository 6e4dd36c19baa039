"""The cost model: predicts larger machines from the measurements of one."""
