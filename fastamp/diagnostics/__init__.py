"""Diagnostics of models, precisions, configs and the environment.

precision_diagnostics: pre-flight before the first step, crash dump after a failure; used by the trainer.
isolated_passes: forward and backward passes over one batch without side effects (errors: error_context).
nan_locator: search for the first module with a non-finite value (hooks: nan_observer; message: nan_location).
precision_check: comparison of a precision with float32, for preflight and doctor; layer_check compares single layers.
doctor: analysis of mixed precision for a config (profiling, fp32_search); doctor_report formats the results.
crash: crash dump of a failed step; replay runs the step again. config_check: consistency of config values.
environment: report of versions, devices and supported precisions (environment_queries, smoke_train).
"""
