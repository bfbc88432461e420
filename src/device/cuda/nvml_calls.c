/* The table of NVML's calls. */
#include "device/cuda/nvml_calls.h"

#include "base/fail.h"

#define WANTED(name, member, optional) {name, offsetof(even_nvml, member), optional}
static const even_library_wanted wanted[] = {
    WANTED("nvmlInit_v2", init, false),
    WANTED("nvmlShutdown", shutdown, false),
    WANTED("nvmlSystemGetDriverVersion", driver_version, true),
    WANTED("nvmlDeviceGetHandleByPciBusId_v2", by_bus, true),
    WANTED("nvmlDeviceGetHandleByUUID", by_uuid, true),
    WANTED("nvmlDeviceGetTemperature", temperature, true),
    WANTED("nvmlDeviceGetPowerUsage", power, true),
    WANTED("nvmlDeviceGetEnforcedPowerLimit", power_limit, true),
    WANTED("nvmlDeviceGetClockInfo", clock, true),
    WANTED("nvmlDeviceGetMemoryInfo", memory, true),
    WANTED("nvmlDeviceGetUtilizationRates", utilization, true),
    WANTED("nvmlDeviceGetProcessUtilization", processes, true),
    WANTED("nvmlDeviceGetCpuAffinity", affinity, true),
    WANTED("nvmlDeviceGetCurrentClocksEventReasons", reasons, true),
    WANTED("nvmlDeviceGetCurrentClocksThrottleReasons", older_reasons, true),
    WANTED("nvmlDeviceGetTotalEccErrors", errors, true),
    WANTED("nvmlEventSetCreate", events_make, true),
    WANTED("nvmlDeviceRegisterEvents", events_register, true),
    WANTED("nvmlEventSetWait_v2", events_wait, true),
    WANTED("nvmlEventSetFree", events_free, true),
};

even_status even_nvml_open(const char *library, even_nvml *out) {
  *out = (even_nvml){.library = {.handle = NULL}};
  EVEN_TRY(even_library_open(library, &out->library));
  const char *missing = even_library_take(&out->library, wanted, sizeof wanted / sizeof wanted[0], out);
  return missing == NULL ? EVEN_OK : even_fail(EVEN_ERR_UNSUPPORTED, "%s has no %s: it is too old", library, missing);
}

void even_nvml_close(even_nvml *nvml) {
  even_library_close(&nvml->library);
}
