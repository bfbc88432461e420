/* gpu_profiles.json: the file in which `evenstep profile` leaves what it measured (even_profile_speeds reads it). */
#ifndef EVEN_DEVICE_PROFILE_H
#define EVEN_DEVICE_PROFILE_H

#include "base/text.h"
#include "device/host.h"
#include "device/measure.h"

/* "evenstep-profile-1". */
extern const char even_profile_format[];

/* Appends the file's content: `devices` and their measurements, in the same order. */
even_status even_profile_write(const even_host *host, const even_device_list *devices,
                               const even_measure_result *result, even_text *out) EVEN_MUST_USE;
/* What even_profile_speeds and even_profile_strengths read of a file, of `text`; `origin` is put into errors.
 * EVEN_ERR_INPUT. */
even_status even_profile_read(const char *origin, const char *text, size_t bytes, const even_device_list *devices,
                              double *speeds) EVEN_MUST_USE;
even_status even_profile_read_strengths(const char *origin, const char *text, size_t bytes,
                                        even_device_list *devices) EVEN_MUST_USE;

#endif
