"""The task that lm_eval finds here, and the process in which lm_eval runs."""
