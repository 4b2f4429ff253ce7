"""Diagnostics for models, precisions, configs and the environment.

``precision_diagnostics`` runs the pre-flight before the first step and writes crash dumps after a failure; the trainer
uses it. ``isolated_passes`` runs forward and backward passes over one batch without side effects, and ``error_context``
explains their exceptions. ``nan_locator`` finds the first module with a non-finite value (``nan_observer`` contains the
hooks, ``nan_location`` the message). ``precision_check`` compares a precision with float32, for ``preflight`` and
``doctor``; ``layer_check`` compares single layers. ``doctor`` analyzes mixed precision for a config with ``profiling``
and ``fp32_search``; ``doctor_report`` formats the results. ``crash`` defines the crash dump of a failed step, which
``replay`` runs again. ``config_check`` checks that config values are consistent. ``environment`` reports versions,
devices and supported precisions, with ``environment_queries`` and ``smoke_train``.
"""
