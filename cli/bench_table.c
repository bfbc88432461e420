/* The figures of `evenstep bench comm` as a table. */
#include "cli/bench_comm.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* NaN where the row lacks it. */
static double figure(const json_t *row, const char *table, const char *way) {
  const json_t *value = json_object_get(json_object_get(row, table), way);
  return json_is_number(value) ? json_number_value(value) : NAN;
}

static const json_t *same_exchange(const json_t *rows, const json_t *wanted) {
  for (size_t i = 0; i < json_array_size(rows); i++) {
    const json_t *row = json_array_get(rows, i);
    if (json_equal(json_object_get(row, "collective"), json_object_get(wanted, "collective")) &&
        json_equal(json_object_get(row, "bytes"), json_object_get(wanted, "bytes"))) {
      return row;
    }
  }
  return NULL;
}

static const char *library_of(const json_t *mpi) {
  const char *library = json_string_value(json_object_get(mpi, "library"));
  return library == NULL ? "" : library;
}

static void print(double value, int width, int digits) {
  if (isnan(value)) {
    (void)printf(" %*s", width, "-");
  } else {
    (void)printf(" %*.*f", width, digits, value);
  }
}

/* `several`: which MPI it was is said, too. */
static void row_print(const json_t *row, const json_t *mpi, bool several) {
  double arena = figure(row, "seconds", "arena");
  double plain = figure(row, "seconds", "plain");
  double gloo = figure(row, "seconds", "gloo");
  double memory = figure(row, "seconds", "memory");
  double peer = mpi == NULL ? NAN : figure(mpi, "seconds", "mpi");
  json_int_t bytes = json_integer_value(json_object_get(row, "bytes"));
  double of_memory = bytes >= (1 << 24) ? memory / arena : NAN; /* below, caches make it no bound */
  (void)printf("%-15s %11" JSON_INTEGER_FORMAT, json_string_value(json_object_get(row, "collective")), bytes);
  print(arena * 1e6, 10, 1);
  print(plain * 1e6, 10, 1);
  print(gloo * 1e6, 10, 1);
  print(peer * 1e6, 10, 1);
  print(figure(row, "bus_gb_per_second", "arena"), 8, 2);
  print(figure(row, "bus_gb_per_second", "plain"), 8, 2);
  print(gloo / plain, 7, 1);
  print(peer / (isnan(arena) ? plain : arena), 7, 1); /* MPI's calls cost no detour through torch either */
  print(of_memory, 8, 2);
  (void)printf("%s%s\n", several ? "  " : "", several ? library_of(mpi) : "");
}

void even_bench_print(const json_t *report, const json_t *mpi, const char *mpi_note) {
  const json_t *rows = json_object_get(report, "rows");
  const char *library = library_of(mpi);
  bool several = json_array_size(json_object_get(mpi, "each")) > 1;
  (void)printf("%-15s %11s %10s %10s %10s %10s %8s %8s %7s %7s %8s%s\n", "COLLECTIVE", "BYTES", "ARENA us", "PLAIN us",
               "GLOO us", "MPI us", "GB/s", "GB/s", "GLOO", "MPI", "ARENA", several ? "  THE FASTEST MPI" : "");
  (void)printf("%-15s %11s %10s %10s %10s %10s %8s %8s %7s %7s %8s\n", "", "", "", "", "", "", "arena", "plain",
               "/plain", "/arena", "/memory");
  for (size_t i = 0; i < json_array_size(rows); i++) {
    const json_t *row = json_array_get(rows, i);
    row_print(row, same_exchange(json_object_get(mpi, "rows"), row), several);
  }
  (void)printf(
      "\nMedians. arena: C's call on memory that the ranks share; plain, Gloo: torch.distributed on any tensor. GB/s: "
      "bytes that cross between ranks.\n/memory: of the speed at which this core adds to as much memory in place, in "
      "the same rounds.\nwith      torch %s, %s%s%s\n",
      json_string_value(json_object_get(report, "torch")), json_string_value(json_object_get(report, "simd")),
      library[0] == '\0' ? "" : ", ", library);
  if (mpi_note[0] != '\0') {
    (void)printf("note      MPI not measured: %s\n", mpi_note);
  }
}
