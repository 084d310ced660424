"""JSON Schema of job.yaml (draft 2020-12), for editors and for the messages of wrong values."""

from functools import cache
from typing import Any

from launcher.config.models import JobConfig
from launcher.config.training import accepted_training_keys, training_key_schema


@cache
def job_schema() -> dict[str, Any]:
    """The schema of everything that a job.yaml may hold, short forms and TrainingArguments keys included."""
    schema = JobConfig.model_json_schema(mode="validation")
    schema["properties"]["training"] |= {
        "properties": {key: training_key_schema(key) for key in accepted_training_keys()},
        "additionalProperties": False,
    }
    schema["anyOf"] = [{"required": ["model", "data"]}, {"required": ["command"]}]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ftlaunch job.yaml",
        **{key: value for key, value in schema.items() if key != "title"},
    }
