/*
 * A stand-in for the driver's libnvidia-ml.so.1: the calls that launcher/host/gpus.py makes through nvidia-ml-py,
 * answered from the environment, so that any mix of cards can be seen on a machine that has none.
 *
 *   FAKE_NVML           8xA100 | 4xA100+4xV100 | none (or unset) | no-driver | mismatch | hang
 *   FAKE_NVML_LOST      2,5        these indices answer NVML_ERROR_GPU_IS_LOST
 *   FAKE_NVML_USED_MIB  20480      memory that somebody uses, on every card; 3=20480 on card 3 alone
 *   FAKE_NVML_MIG       2          each card is split into so many MIG devices
 *   FAKE_NVML_ECC       3=2        uncorrected ECC errors, on every card or on one
 *   FAKE_NVML_REMAP     3=pending  or failed: rows of its memory
 *   FAKE_NVML_MODE      2          compute mode of every card (2: prohibited)
 *   FAKE_NVML_THROTTLE  3=64       bits of the throttle reasons
 *   FAKE_NVML_LINKS     12 or 3=10 NVLinks that are up, of 12 (unset: the card has none)
 *   FAKE_NVML_PROCESS   3=4242     a process that holds USED_MIB of that card
 *   FAKE_NVML_OLD       1          a driver from before 510: no nvmlDeviceGetMemoryInfo_v2
 *   FAKE_NVML_ECC       3          uncorrected errors of every card since the driver was loaded; unset: a card without ECC
 *   FAKE_NVML_DRIVER    550.54.14
 *   FAKE_NVML_CUDA      12.4       CUDA version that the driver runs
 *
 * A card's name that is not in the table below is an error on standard error: a typo must not look like "no GPU".
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18, UNKNOWN = 999
};
enum { MAX_CARDS = 64, MAX_MIG = 7, NUM_LINKS = 12, RESERVED_MIB = 512, MEMORY_V2 = 0x02000028 };

typedef struct { const char *key, *name; int major, minor; unsigned total_mib; } Model;

/* Capability and memory as drivers report them (MiB). */
static const Model MODELS[] = {
    {"V100", "Tesla V100-SXM2-16GB", 7, 0, 16160},
    {"V100-32", "Tesla V100-SXM2-32GB", 7, 0, 32510},
    {"T4", "Tesla T4", 7, 5, 15109},
    {"A10", "NVIDIA A10", 8, 6, 22731},
    {"A100", "NVIDIA A100-SXM4-80GB", 8, 0, 81251},
    {"A100-40", "NVIDIA A100-SXM4-40GB", 8, 0, 40537},
    {"A800", "NVIDIA A800-SXM4-80GB", 8, 0, 81251},
    {"L20", "NVIDIA L20", 8, 9, 45056},
    {"4090", "NVIDIA GeForce RTX 4090", 8, 9, 24564},
    {"5090", "NVIDIA GeForce RTX 5090", 12, 0, 31744},
    {"H20", "NVIDIA H20", 9, 0, 97871},
    {"H100", "NVIDIA H100 80GB HBM3", 9, 0, 81559},
    {"H800", "NVIDIA H800", 9, 0, 81559},
    {"H200", "NVIDIA H200", 9, 0, 143771},
    {"B200", "NVIDIA B200", 10, 0, 183359},
};

/* A handle points to one of these; mig is -1 for the card itself. */
typedef struct { unsigned index; int mig; const Model *model; } Device;

typedef struct { unsigned long long total, free, used; } MemoryV1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;

static Device cards[MAX_CARDS];
static Device migs[MAX_CARDS][MAX_MIG];
static unsigned num_cards;
static int initialised;

static const char *setting(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

static const Model *find_model(const char *key, size_t length)
{
    for (size_t i = 0; i < sizeof MODELS / sizeof *MODELS; i++)
        if (strlen(MODELS[i].key) == length && !strncmp(MODELS[i].key, key, length))
            return &MODELS[i];
    return NULL;
}

/* Fill `cards` from "4xA100+4xV100". */
static int read_cards(const char *text)
{
    num_cards = 0;
    while (*text) {
        char *end;
        unsigned long count = strtoul(text, &end, 10);
        size_t length = *end == 'x' ? strcspn(end + 1, "+") : 0;
        const Model *model = length ? find_model(end + 1, length) : NULL;
        if (!model || !count || num_cards + count > MAX_CARDS) {
            fprintf(stderr, "stand-in NVML: FAKE_NVML is wrong from here: %s\n", text);
            return UNKNOWN;
        }
        for (; count; count--, num_cards++) {
            cards[num_cards] = (Device){num_cards, -1, model};
            for (int m = 0; m < MAX_MIG; m++)
                migs[num_cards][m] = (Device){num_cards, m, model};
        }
        text = end + 1 + length;
        text += *text == '+';
    }
    return OK;
}

/* Is `index` in a list such as "2,5"? */
static int is_listed(const char *list, unsigned index)
{
    while (*list) {
        char *end;
        if (strtoul(list, &end, 10) == index && end != list)
            return 1;
        list = *end ? end + 1 : end;
    }
    return 0;
}

/* What "20480" says of every card, and "3=20480" of card 3 alone; NULL where it says nothing of `index`. */
static const char *said_of(const char *name, unsigned index)
{
    const char *text = setting(name, "");
    const char *equals = strchr(text, '=');
    if (!*text || (equals && strtoul(text, NULL, 10) != index))
        return NULL;
    return equals ? equals + 1 : text;
}

static unsigned long long number_of(const char *name, unsigned index)
{
    const char *text = said_of(name, index);
    return text ? strtoull(text, NULL, 10) : 0;
}

static unsigned long long used_bytes(unsigned index)
{
    return number_of("FAKE_NVML_USED_MIB", index) << 20;
}

int nvmlInitWithFlags(unsigned flags)
{
    const char *text = setting("FAKE_NVML", "none");
    (void)flags;
    if (!strcmp(text, "no-driver"))
        return DRIVER_NOT_LOADED;
    if (!strcmp(text, "mismatch"))
        return LIB_RM_VERSION_MISMATCH;
    while (!strcmp(text, "hang"))
        pause();
    int result = read_cards(strcmp(text, "none") ? text : "");
    initialised = result == OK;
    return result;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void)
{
    int result = initialised ? OK : UNINITIALIZED;
    initialised = 0;
    return result;
}

const char *nvmlErrorString(int result)
{
    switch (result) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case FUNCTION_NOT_FOUND: return "Function Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    snprintf(version, length, "%s", setting("FAKE_NVML_DRIVER", "580.65.06"));
    return initialised ? OK : UNINITIALIZED;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    int major = 13, minor = 0;
    sscanf(setting("FAKE_NVML_CUDA", "13.0"), "%d.%d", &major, &minor);
    *version = 1000 * major + 10 * minor;
    return initialised ? OK : UNINITIALIZED;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = num_cards;
    return initialised ? OK : UNINITIALIZED;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device)
{
    if (!initialised)
        return UNINITIALIZED;
    if (index >= num_cards)
        return INVALID_ARGUMENT;
    if (is_listed(setting("FAKE_NVML_LOST", ""), index))
        return GPU_IS_LOST;
    *device = &cards[index];
    return OK;
}

int nvmlDeviceGetIndex(Device *device, unsigned *index)
{
    *index = device->index;
    return OK;
}

int nvmlDeviceGetName(Device *device, char *name, unsigned length)
{
    snprintf(name, length, "%s", device->model->name);
    return OK;
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned length)
{
    if (device->mig < 0)
        snprintf(uuid, length, "GPU-%08x-0000-4000-8000-%012x", 0xa0000000u + device->index, device->index);
    else
        snprintf(uuid, length, "MIG-%08x-0000-4000-8000-%012x", 0xb0000000u + device->index, (unsigned)device->mig);
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(Device *device, int *major, int *minor)
{
    *major = device->model->major;
    *minor = device->model->minor;
    return OK;
}

/* Version 1 counts the driver's reserve as used, version 2 keeps it apart: so does the real one. */
int nvmlDeviceGetMemoryInfo(Device *device, MemoryV1 *memory)
{
    unsigned long long reserved = (unsigned long long)RESERVED_MIB << 20;
    memory->total = (unsigned long long)device->model->total_mib << 20;
    memory->used = used_bytes(device->index) + reserved;
    memory->free = memory->total - memory->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *memory)
{
    if (*setting("FAKE_NVML_OLD", ""))
        return FUNCTION_NOT_FOUND;
    if (memory->version != MEMORY_V2)
        return INVALID_ARGUMENT;
    memory->total = (unsigned long long)device->model->total_mib << 20;
    memory->reserved = (unsigned long long)RESERVED_MIB << 20;
    memory->used = used_bytes(device->index);
    memory->free = memory->total - memory->used - memory->reserved;
    return OK;
}

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *celsius)
{
    (void)device, (void)sensor;
    *celsius = 41;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count)
{
    (void)device;
    *count = *setting("FAKE_NVML_MIG", "") ? MAX_MIG : 0;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **mig)
{
    if (index >= strtoul(setting("FAKE_NVML_MIG", "0"), NULL, 10) || index >= MAX_MIG)
        return NOT_FOUND;
    *mig = &migs[device->index][index];
    return OK;
}

typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } Process;

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *processes)
{
    unsigned pid = (unsigned)number_of("FAKE_NVML_PROCESS", device->index), room = *count;
    *count = pid ? 1 : 0;
    if (!pid)
        return OK;
    if (!processes || !room)
        return INSUFFICIENT_SIZE;
    processes[0] = (Process){pid, used_bytes(device->index), 0, 0};
    return OK;
}

int nvmlDeviceGetTotalEccErrors(Device *device, unsigned type, unsigned counter, unsigned long long *errors)
{
    (void)counter;
    *errors = type == 1 ? number_of("FAKE_NVML_ECC", device->index) : 0;
    return device->model->major >= 7 ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetRemappedRows(Device *device, unsigned *corrected, unsigned *lost, unsigned *pending, unsigned *failed)
{
    const char *text = said_of("FAKE_NVML_REMAP", device->index);
    if (device->model->major < 8)
        return NOT_SUPPORTED;
    *corrected = *lost = 0;
    *pending = text && !strcmp(text, "pending");
    *failed = text && !strcmp(text, "failed");
    return OK;
}

int nvmlDeviceGetRetiredPagesPendingStatus(Device *device, unsigned *pending)
{
    const char *text = said_of("FAKE_NVML_REMAP", device->index);
    *pending = text && !strcmp(text, "pending");
    return device->model->major < 8 ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetComputeMode(Device *device, unsigned *mode)
{
    *mode = (unsigned)number_of("FAKE_NVML_MODE", device->index);
    return OK;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons)
{
    *reasons = number_of("FAKE_NVML_THROTTLE", device->index);
    return OK;
}

/* Of a card that "3=10" does not name all links are up. */
int nvmlDeviceGetNvLinkState(Device *device, unsigned link, unsigned *active)
{
    const char *text = said_of("FAKE_NVML_LINKS", device->index);
    if (!*setting("FAKE_NVML_LINKS", ""))
        return NOT_SUPPORTED;
    if (link >= NUM_LINKS)
        return INVALID_ARGUMENT;
    *active = !text || link < strtoul(text, NULL, 10);
    return OK;
}
