"""Diagnostics: what looks for faults of a model, a precision, a config or a machine.

passes: passes over one batch without side effects; error_context explains their errors.
locate: the first module with a value that is not finite (observer watches, location describes).
layer_check, precision_check: whether a precision holds a model, for the pre-flight (preflight) and for the doctor.
doctor, doctor_report: analysis of a config's model (measures, fp32_search), and its tables, verdict and files.
crash, replay: the file of a failed step, and its replay. config_check: values that do not fit each other.
machine, devices, smoke_train: the machine, what it supports, and whether it trains at all.
"""
