#!/usr/bin/env bash
# Builds images/Dockerfile without a container engine and looks at the result from inside: `make image-check`.
#
# The base is a minimal Debian that debootstrap makes in a work folder; buildah builds on it in a chroot. What the
# Dockerfile takes from its CUDA base is therefore not tested, everything else is. Needs root, buildah, debootstrap and
# about 6 GB of disk for some minutes; leaves nothing behind, also when it fails or is interrupted.
#
# pip inside the build uses what pip uses out here (`pip config list`): certificate bundle, index, extra indexes, and
# the first local folder among find-links. Environment:
#   WHEEL_DIR        a folder of wheels, for example with a CPU build of torch (default: that find-links folder)
#   BASE_SUITE       Debian release of the base (bookworm: Python 3.11)
#   DEBIAN_MIRROR    mirror for debootstrap (its own default)
#   EXTRAS           extras of the package to install (the Dockerfile's default; empty: a quick try without torch)
#   IMAGE_CHECK_DIR  where to make the work folder (TMPDIR, else /tmp)
#   BUILD_TIMEOUT_S  bound on the build (3600)
#   CHECK_TIMEOUT_S  bound on each check (600)
# Exit code: 0 all passed, 1 a check failed, 2 cannot run here, else that of the build.
# shellcheck disable=SC2016  # what runs inside is quoted on purpose
set -euo pipefail

repo=$(cd "$(dirname "$0")/.." && pwd)
base=localhost/ftlaunch-check-base
image=localhost/ftlaunch-check
stranger_uid=54321 # in no passwd file, with group 0: what OpenShift gives a container

stop() {
  echo "image-check: $*" >&2
  exit 2
}

[ "$(id -u)" = 0 ] || stop "needs root for debootstrap and chroot; run it with sudo"
for tool in buildah debootstrap unshare setsid python3; do
  command -v "$tool" > /dev/null || stop "$tool is missing: apt-get install buildah debootstrap util-linux python3"
done
for file in pyproject.toml constraints.txt README.md LICENSE launcher/__init__.py; do
  [ -f "$repo/$file" ] || stop "$file is missing, the image needs it"
done

work=$(mktemp -d "${IMAGE_CHECK_DIR:-${TMPDIR:-/tmp}}/ftlaunch-image-check.XXXXXX")
store=(buildah --root "$work/storage" --runroot "$work/runroot")
long_job=

clean_up() {
  local status=$?
  set +e # whatever of this does not work, the rest must still be done
  trap - EXIT
  trap '' INT TERM HUP
  if [ -n "$long_job" ]; then
    kill -TERM -- "-$long_job" 2> /dev/null && sleep 2
    kill -KILL -- "-$long_job" 2> /dev/null
  fi
  "${store[@]}" umount --all
  "${store[@]}" rm --all
  "${store[@]}" rmi --all --force
  # Folders that are mounts still (a killed chroot leaves some): undo the deepest first.
  awk -v top="$work/" 'index($5, top) == 1 { print $5 }' /proc/self/mountinfo | sort -r | xargs -r -n 1 umount -l
  rm -rf --one-file-system "$work"
  exit "$status"
} > /dev/null 2>&1
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# A command of minutes, in its own process group, so that a signal to this script ends all of it at once.
long() {
  setsid "$@" > "$work/log" 2>&1 &
  long_job=$!
  local status=0
  wait "$long_job" || status=$?
  long_job=
  if [ "$status" != 0 ]; then
    tail -n 60 "$work/log" >&2
    echo "image-check: exit code $status from: $*" >&2
    exit "$status"
  fi
}

# What pip uses for an option: environment, else its configuration files, else nothing.
pip_option() {
  local variable
  variable=PIP_$(tr a-z- A-Z_ <<< "$1")
  printf '%s' "${!variable-$(python3 -m pip config get "global.$1" 2> /dev/null || true)}"
}

build_args=()
pip_args=()
cert=$(pip_option cert)
if [ -n "$cert" ]; then
  build_args+=(--volume "$cert:/run/ftlaunch-ca.crt:ro" --build-arg PIP_CERT=/run/ftlaunch-ca.crt)
fi
index=$(pip_option index-url)
if [ -n "$index" ]; then
  build_args+=(--build-arg "PIP_INDEX_URL=$index")
fi
for url in $(pip_option extra-index-url); do
  [[ $url == http* ]] && pip_args+=(--extra-index-url "$url")
done
wheel_dir=${WHEEL_DIR-}
for link in $(pip_option find-links); do
  [ -z "$wheel_dir" ] && [ -d "${link#file://}" ] && wheel_dir=${link#file://}
done
if [ -n "$wheel_dir" ]; then
  [ -d "$wheel_dir" ] || stop "WHEEL_DIR=$wheel_dir is no folder"
  build_args+=(--volume "$(cd "$wheel_dir" && pwd):/run/ftlaunch-wheels:ro")
  pip_args+=(--find-links /run/ftlaunch-wheels)
fi
build_args+=(--build-arg "PIP_EXTRA_ARGS=${pip_args[*]}")
if [ -n "${EXTRAS+set}" ]; then
  build_args+=(--build-arg "EXTRAS=$EXTRAS")
fi
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$repo/launcher/__init__.py")

echo "image-check: base (debootstrap ${BASE_SUITE:-bookworm})"
container=$("${store[@]}" from scratch)
root=$("${store[@]}" mount "$container")
long debootstrap --variant=minbase "${BASE_SUITE:-bookworm}" "$root" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"}
"${store[@]}" umount "$container" > /dev/null
"${store[@]}" commit --quiet --rm "$container" "$base" > /dev/null
echo "image-check: base made after $SECONDS s; building images/Dockerfile"
long timeout "${BUILD_TIMEOUT_S:-3600}" "${store[@]}" bud --isolation chroot \
  --file "$repo/images/Dockerfile" --tag "$image" \
  --build-arg "BASE_IMAGE=$base" --build-arg "VERSION=$version" "${build_args[@]}" "$repo"
echo "image-check: built after $SECONDS s"

# A small job, seen inside under /job.
job=$work/job
mkdir -p "$job/model"
cat > "$job/job.yaml" << 'EOF'
output_dir: /tmp/run
model: {path: ./model}
method: lora
data: {train: [train.jsonl], max_length: 128}
training: {max_steps: 2, per_device_train_batch_size: 1}
EOF
cat > "$job/train.jsonl" << 'EOF'
{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
{"messages": [{"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "6"}]}
EOF
cat > "$job/model/config.json" << 'EOF'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
 "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
 "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "torch_dtype": "float32"}
EOF
# Runs inside: the versions that the image has against those it was to have.
cat > "$job/versions.py" << 'EOF'
import importlib.metadata as metadata
import json
import sys

import launcher
from pip._vendor.packaging.requirements import Requirement  # pip's copy: the launcher alone does not need packaging

wanted_version, is_full = sys.argv[1], sys.argv[2] == "full"
problems, agreeing = [], []
for line in open("/opt/ftlaunch/constraints.txt", encoding="utf-8"):
    text = line.split("#")[0].strip()
    if not text:
        continue
    requirement = Requirement(text)
    if requirement.marker and not requirement.marker.evaluate():
        continue
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        continue
    agreeing.append(f"{requirement.name} {found}")
    if not requirement.specifier.contains(found, prereleases=True):
        problems.append(f"{requirement.name} is {found}, constraints.txt says {requirement.specifier}")
if is_full:
    for name in ("torch", "deepspeed", "transformers", "peft", "accelerate", "bitsandbytes", "gguf", "ninja"):
        if not any(text.startswith(name + " ") for text in agreeing):
            problems.append(f"{name} is not installed, or not in constraints.txt")
distribution = metadata.distribution("ftlaunch")
if distribution.version != wanted_version:
    problems.append(f"ftlaunch is {distribution.version}, the repository has {wanted_version}")
if json.loads(distribution.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"):
    problems.append("ftlaunch is an editable install")
if not (launcher.__file__ or "").startswith("/opt/ftlaunch/lib/"):
    problems.append(f"launcher is imported from {launcher.__file__}, not from the virtual environment")
print("ftlaunch", distribution.version, "with", ", ".join(agreeing))
sys.exit("\n".join(problems) if problems else 0)
EOF

container=$("${store[@]}" from "$image")
"${store[@]}" inspect --type image "$image" > "$work/image.json"
mapfile -t image_env < <(python3 -c '
import json, sys
print("\n".join(json.load(sys.stdin)["OCIv1"]["config"]["Env"]))' < "$work/image.json")

inside() {
  timeout "${CHECK_TIMEOUT_S:-600}" "${store[@]}" run --isolation chroot --volume "$job:/job:ro" "$container" -- "$@"
}

# The strictest host: process 1 of its PID namespace, a user id nobody knows, no HOME, a read-only root with a /tmp.
as_stranger() {
  local root status=0
  root=$("${store[@]}" mount "$container")
  # shellcheck disable=SC2016  # expanded by the inner shell
  timeout "${CHECK_TIMEOUT_S:-600}" unshare --mount --pid --fork --kill-child bash -euc '
    root=$1 job=$2 uid=$3
    shift 3
    mount --bind "$root" "$root"
    mount -o remount,bind,ro "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    mkdir "$root/tmp/job"
    mount --bind "$job" "$root/tmp/job"
    mount -o remount,bind,ro "$root/tmp/job"
    exec env -i "${@:2:$1}" "$(command -v chroot)" --userspec="$uid:0" --groups=0 "$root" "${@:$(($1 + 2))}"
  ' stranger "$root" "$job" "$stranger_uid" "${#image_env[@]}" "${image_env[@]}" "$@" || status=$?
  "${store[@]}" umount "$container" > /dev/null
  return "$status"
}

image_config() {
  python3 - "$version" "$work/image.json" << 'EOF'
import json
import sys

config = json.load(open(sys.argv[2], encoding="utf-8"))["OCIv1"]["config"]
labels = config.get("Labels") or {}
problems = []
if config.get("Entrypoint") != ["ftlaunch"]:
    problems.append(f"ENTRYPOINT is {config.get('Entrypoint')}, not [\"ftlaunch\"]")
problems += [f"{text} is preset" for text in config["Env"] if text.startswith(("NCCL_", "GLOO_", "HOME="))]
if labels.get("org.opencontainers.image.version") != sys.argv[1]:
    problems.append(f"the version label is {labels.get('org.opencontainers.image.version')!r}")
if config.get("User"):
    problems.append(f"the image fixes the user to {config['User']}")
sys.exit("\n".join(problems) if problems else 0)
EOF
}

num_passed=0
num_failed=0
# check NAME COMMAND...: the command's output is shown when it fails.
check() {
  local name=$1 status=0
  shift
  "$@" > "$work/log" 2>&1 < /dev/null || status=$?
  if [ "$status" = 0 ]; then
    num_passed=$((num_passed + 1))
    echo "  ok    $name"
  else
    num_failed=$((num_failed + 1))
    echo "  FAIL  $name (exit code $status)"
    tail -n 40 "$work/log" | sed 's/^/          /'
  fi
}

full=full
[ -n "${EXTRAS-default}" ] || full=launcher-only
check "ftlaunch --help" inside ftlaunch --help
check "ftlaunch plan of a small job, changing nothing" inside sh -c '
  ftlaunch plan --json --config /job/job.yaml | python -m json.tool && [ ! -e /tmp/run ]'
check "as DLC's UserCommand, PATH reset by a login shell" \
  inside env -i PATH=/usr/local/bin:/usr/bin:/bin sh -c 'exec ftlaunch --help'
check "which ftlaunch" inside sh -c '[ "$(which ftlaunch)" = /opt/ftlaunch/bin/ftlaunch ]'
check "not editable; versions agree with constraints.txt" inside python /job/versions.py "$version" "$full"
check "packages agree with one another" inside pip check
check "RDMA libraries load, a provider for mlx5 is there" inside sh -c '
  python -c "import ctypes; [ctypes.CDLL(name) for name in (\"libibverbs.so.1\", \"librdmacm.so.1\")]" &&
  ls /usr/lib/*/libibverbs/libmlx5-*.so'
check "ssh, pdsh, ip, pkill, cc, c++" inside sh -c '
  for tool in ssh pdsh ip pkill cc c++; do command -v $tool || exit 1; done'
check "a C extension compiles (Triton's launcher stub)" inside sh -c \
  'echo "#include <Python.h>" | cc -shared -fPIC -x c - -o /tmp/stub.so $(python3-config --includes)'
check "image configuration: entrypoint, labels, nothing preset" image_config
check "as process 1, unknown user, no HOME, read-only root: --help" as_stranger ftlaunch --help
check "the same: plan" as_stranger ftlaunch plan --config /tmp/job/job.yaml
if [ "$full" = full ]; then
  check "the same: the training stack imports" as_stranger python -c \
    'import os; assert os.getpid() == 1; import torch, deepspeed, transformers, peft, accelerate, bitsandbytes'
fi

echo
inside python /job/versions.py "$version" "$full" 2> /dev/null < /dev/null || true
size=$("${store[@]}" images --noheading --format '{{.Size}}' "$image" | tail -n 1)
echo "image of $size, $(uname -m), $SECONDS s in all"
echo "$num_passed passed, $num_failed failed"
[ "$num_failed" = 0 ]
