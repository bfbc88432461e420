/* Invented machines for the tests: hwloc's synthetic topologies and trees of /proc and /sys in a temporary folder. */
#ifndef TESTS_DEVICE_MACHINE_H
#define TESTS_DEVICE_MACHINE_H

#include "device/source.h"
#include "support/folder.h"

/* Two sockets, 4 cores each, 2 hardware threads a core. */
#define TWO_SOCKETS "pack:2 [numa(memory=8GiB)] l3:1(size=16MiB) core:4 pu:2"
#define TWO_CORES "pack:1 [numa(memory=4GiB)] core:2 pu:1"

/* A folder that stands for "/"; machine_file adds a file to it. Removed with machine_remove. */
typedef struct machine {
  char root[FOLDER_BYTES];
  even_device_source source;
} machine;

void machine_make(machine *made, const char *synthetic);
void machine_file(const machine *made, const char *path, const char *content);
void machine_remove(machine *made);

/* All its devices; *out is empty after an error. Free with even_device_list_free. */
even_status machine_devices(const machine *made, even_device_list *out);

#endif
