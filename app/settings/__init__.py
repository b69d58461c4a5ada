"""Every setting, typed and frozen. One TOML file holds the settings; an unknown key is an error.

Secrets may come from the environment instead of the file, so that compose and Kubernetes can mount them:
TINSMITH_REDIS_URL, TINSMITH_BROKER_URL, TINSMITH_S3_ACCESS_KEY, TINSMITH_S3_SECRET_KEY, TINSMITH_URL_SECRET,
TINSMITH_CAPTURE_SECRET, TINSMITH_API_KEY, TINSMITH_OPERATOR_KEY.
"""

from app.settings.files import (
    METRICS_PORT_VARIABLE,
    SETTINGS_VARIABLE,
    checked_key,
    defaults,
    from_environment,
    hash_key,
    load,
    parse,
    without_secret_variables,
)
from app.settings.root import Settings
from app.settings.server import (
    SENTINEL_SCHEMES,
    ApiSettings,
    EngineSettings,
    LimitSettings,
    RedisSettings,
    StoreSettings,
    TracingSettings,
    netloc,
)
from app.settings.workers import CUDA_BUILDS, NO_VLLM, BaseModelSettings, SamplerSettings, TrainerSettings

__all__ = [
    "CUDA_BUILDS",
    "METRICS_PORT_VARIABLE",
    "NO_VLLM",
    "SENTINEL_SCHEMES",
    "SETTINGS_VARIABLE",
    "ApiSettings",
    "BaseModelSettings",
    "EngineSettings",
    "LimitSettings",
    "RedisSettings",
    "SamplerSettings",
    "Settings",
    "StoreSettings",
    "TracingSettings",
    "TrainerSettings",
    "checked_key",
    "defaults",
    "from_environment",
    "hash_key",
    "load",
    "netloc",
    "parse",
    "without_secret_variables",
]
