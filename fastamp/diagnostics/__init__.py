"""Diagnostics of models, precisions, configs and the environment.

precision_diagnostics: pre-flight before the first step, crash dump after a failure; used by the trainer.
isolated_passes: forward and backward passes over one batch without side effects; error_context explains their errors.
nan_locator: first module with a non-finite value (nan_observer has the hooks, nan_location the message).
precision_check: comparison of a precision with float32, for preflight and doctor; layer_check compares single layers.
doctor: analysis of the model of a config (profiling, fp32_search); doctor_report has its tables, verdict and files.
crash: crash dump of a failed step; replay runs it again. config_check: consistency of config values.
environment: report of versions, devices and supported precisions (environment_queries), with a smoke_train.
"""
