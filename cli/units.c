/* Amounts in words. */
#include "cli/units.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

const char *even_cli_bytes(uint64_t bytes, char *out, size_t size) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double amount = (double)bytes;
  size_t unit = 0;
  while (amount >= 1023.95 && unit + 1 < sizeof units / sizeof units[0]) {
    amount /= 1024;
    unit++;
  }
  (void)snprintf(out, size, amount == (double)(uint64_t)amount ? "%.0f %s" : "%.1f %s", amount, units[unit]);
  return out;
}

/* The smallest number in the set that is larger than `after`; -1: none. */
static int32_t next_cpu(const int32_t *cpus, size_t count, int32_t after) {
  int32_t next = -1;
  for (size_t i = 0; i < count; i++) {
    if (cpus[i] > after && (next < 0 || cpus[i] < next)) {
      next = cpus[i];
    }
  }
  return next;
}

const char *even_cli_cpus(const int32_t *cpus, size_t count, char *out, size_t size) {
  size_t used = 0;
  out[0] = '\0';
  for (int32_t first = next_cpu(cpus, count, -1); first >= 0;) {
    int32_t last = first;
    int32_t next = next_cpu(cpus, count, last);
    char piece[32];
    while (next == last + 1) {
      last = next;
      next = next_cpu(cpus, count, last);
    }
    (void)snprintf(piece, sizeof piece, first == last ? "%s%d" : "%s%d-%d", used > 0 ? "," : "", first, last);
    if (used + strlen(piece) + 4 >= size) {
      (void)snprintf(out + used, size - used, "…");
      break;
    }
    (void)snprintf(out + used, size - used, "%s", piece);
    used += strlen(piece);
    first = next;
  }
  return out;
}
