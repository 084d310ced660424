"""No secret leaves; what is not a secret stays readable."""

from __future__ import annotations

import pytest

from launcher.diagnose.redact import HIDDEN, hide_values, redact_environ, redact_text, secret_values

SECRET = "Zx9" + "qLw72" * 4


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {SECRET}",
        f"token hf_{SECRET}",
        f"key sk-{SECRET}",
        f"id LTAI{SECRET}",
        f"git clone https://bob:{SECRET}@example.com/x.git",
        f"redis://:{SECRET}@cache:6379/0",
        f"HF_TOKEN={SECRET} python train.py",
        f"export OSS_ACCESS_KEY_SECRET='{SECRET}'",
        f'{{"api_key": "{SECRET}", "steps": 10}}',
        f"password: {SECRET}",
        f"ftlaunch --hub-token {SECRET} --steps 10",
        f"wandb_api_key={SECRET}",
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f"aws AKIA{'A1B2' * 4}",
        f"ghp_{SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{SECRET}\n-----END PGP PRIVATE KEY BLOCK-----",
        f"{SECRET}\n{SECRET}\n-----END PRIVATE KEY-----",
        f"STS token CAIS{SECRET}",
        f"wandb login --relogin {SECRET}",
        f"wandb_v1_{SECRET}",
        f"AccessKeySecret: {SECRET}",
        f"accessKeyId={SECRET}",
        f"oss://bucket?x-oss-credential={SECRET}",
        f"GET /x?token={SECRET}&a=1",
    ],
)
def test_a_secret_is_hidden(text: str) -> None:
    hidden = redact_text(text)
    assert SECRET not in hidden
    assert "A1B2A1B2" not in hidden
    assert HIDDEN in hidden
    assert redact_text(hidden) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "{'loss': 1.5, 'num_tokens': 512000, 'epoch': 0.1}",
        "KeyError: 'answer'",
        "store_based_barrier_key:1 (world_size=2, worker_count=1)",
        '  File "/opt/app/train.py", line 8, in step',
        "ssh: Permission denied (publickey,password).",
        "eos_token: </s>",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "https://huggingface.co/a/b/resolve/main/config.json",
    ],
)
def test_a_plain_line_stays(text: str) -> None:
    assert redact_text(text) == text


def test_an_environment_hides_by_name_and_by_value() -> None:
    environ = {
        "HF_TOKEN": "x",
        "MY_SECRET": "y",
        "ALIBABA_CLOUD_ACCESS_KEY_ID": "LTAIx",
        "DB_PASSWORD": "z",
        "WANDB_API_KEY": "w",
        "HTTPS_PROXY": f"http://bob:{SECRET}@proxy:3128",
        "PWD": "/work",
        "TOKENIZERS_PARALLELISM": "false",
        "NCCL_DEBUG": "INFO",
        "MAX_NUM_TOKENS": "8192",
    }
    redacted = redact_environ(environ)
    assert list(redacted) == sorted(environ)
    assert {name for name, value in redacted.items() if value == HIDDEN} == {
        "HF_TOKEN",
        "MY_SECRET",
        "ALIBABA_CLOUD_ACCESS_KEY_ID",
        "DB_PASSWORD",
        "WANDB_API_KEY",
    }
    assert redacted["HTTPS_PROXY"] == f"http://{HIDDEN}@proxy:3128"
    assert (redacted["PWD"], redacted["NCCL_DEBUG"], redacted["MAX_NUM_TOKENS"]) == ("/work", "INFO", "8192")


def test_a_secrets_value_is_hidden_wherever_it_turns_up_and_a_word_is_not() -> None:
    environ = {
        "MY_TOKEN": SECRET,
        "MY_API_KEY": "disabled",
        "AUTH": "/etc/auth/file",
        "N_KEY": "12345678",
        "A_KEY": "ab",
    }
    assert secret_values(environ) == (SECRET,)
    assert hide_values(f"sent {SECRET} to disabled", secret_values(environ)) == f"sent {HIDDEN} to disabled"
