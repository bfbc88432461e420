/* evenstep profile: measures the devices of this host and leaves the result in gpu_profiles.json. */
#include "device/profile.h"
#include "base/fail.h"
#include "cli/command.h"
#include "cli/python.h"
#include "os/file.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

typedef struct profile {
  const char *devices; /* as the user names them, NULL: all */
  const char *output;
  const char *python;
  bool quick, json;
  even_host host;
  even_device_list chosen;
  even_measure_result result;
} profile;

/* One line that is written over and over; only on a terminal. */
static void progress(void *context, size_t done, size_t of, const char *words) {
  (void)context;
  (void)fprintf(stderr, "\r\033[K[%zu/%zu] %s", done, of, words);
  (void)fflush(stderr);
}

static void progress_end(void) {
  (void)fprintf(stderr, "\r\033[K");
  (void)fflush(stderr);
}

static even_status copy_add(const even_device *device, even_device_list *out) {
  even_device_list one;
  EVEN_TRY(even_device_select(device->name, 1, &one));
  even_status status = even_device_list_add(out, &one.items[0]);
  one.count = 0; /* the device lives in `out` now */
  even_device_list_free(&one);
  return status;
}

/* Each device by itself: measured one at a time, they need not share a quota or a core. */
static even_status each_alone(const even_device_list *from, bool nodes, even_device_list *out) {
  for (size_t i = 0; i < from->count; i++) {
    if (nodes || strncmp(from->items[i].name, "numa:", 5) != 0) {
      EVEN_TRY(copy_add(&from->items[i], out));
    }
  }
  return EVEN_OK;
}

static even_status devices_choose(profile *on) {
  even_device_list named;
  if (on->devices == NULL) { /* the only NUMA node is what its cores are */
    return each_alone(&on->host.devices, on->host.context.topology.node_count > 1, &on->chosen);
  }
  EVEN_TRY(even_device_select(on->devices, 0, &named));
  even_status status = each_alone(&named, true, &on->chosen);
  even_device_list_free(&named);
  return status;
}

/* "." or the folder of the output file: that disk is the one that counts. */
static even_status output_folder(const char *output, even_text *out) {
  const char *slash = strrchr(output, '/');
  if (slash == NULL) {
    even_text_add(out, ".");
  } else {
    even_text_append(out, output, slash == output ? 1 : (size_t)(slash - output));
  }
  return even_text_status(out);
}

static even_status measure(profile *on, const char *folder) {
  even_text python = EVEN_TEXT_EMPTY;
  even_status status = even_cli_python(on->python, &python);
  bool terminal = isatty(fileno(stderr)) == 1;
  if (status == EVEN_OK) {
    const even_measure_params params = {.devices = &on->chosen,
                                        .folder = folder,
                                        .python = even_text_string(&python),
                                        .seconds = on->quick ? 0.5 : 1.2,
                                        .rounds = on->quick ? 1 : 2,
                                        .disk_seconds = on->quick ? 0.3 : 1.5,
                                        .cache_bytes = on->host.context.topology.l3_bytes,
                                        .progress = terminal ? progress : NULL};
    status = even_measure(&params, &on->result);
    if (terminal) {
      progress_end();
    }
  }
  even_text_free(&python);
  return status;
}

static void figure_print(double value, int width) {
  if (isnan(value)) {
    (void)printf("  %*s", width, "-");
  } else {
    (void)printf("  %*.*f", width, value < 10 ? 2 : 1, value);
  }
}

static void disturbed_print(const profile *on) {
  for (size_t i = 0; i < on->result.count; i++) {
    const even_measurement *item = &on->result.items[i];
    if (item->like == i && even_measurement_disturbed(&on->chosen.items[i], item)) {
      (void)printf("note      %s was busy with other work (the measurement had %.0f%% of it): measure again in quiet\n",
                   on->chosen.items[i].name, item->cpu_fraction * 100);
    }
  }
}

static void table_print(const profile *on) {
  (void)printf("%-9s %6s  %12s  %12s  %9s  %9s  %6s  %s\n", "DEVICE", "CORES", "FP32 GFLOP/s", "BF16 GFLOP/s",
               "COPY GB/s", "READ GB/s", "SCORE", "MODEL");
  for (size_t i = 0; i < on->result.count; i++) {
    const even_device *device = &on->chosen.items[i];
    const even_measurement *item = &on->result.items[i];
    if (!item->measured) {
      (void)printf("%-9s %6.4g  not measured: %s\n", device->name, device->cores, item->note);
      continue;
    }
    (void)printf("%-9s %6.4g", device->name, device->cores);
    figure_print(item->matmul_fp32_gflops, 12);
    figure_print(item->matmul_bf16_gflops, 12);
    figure_print(item->memory_bandwidth_gb_per_second, 9);
    figure_print(item->memory_read_gb_per_second, 9);
    (void)printf("  %6.3f  %s", item->relative_score, device->model);
    if (item->like != i) {
      (void)printf(" (measured on %s)", on->chosen.items[item->like].name);
    }
    (void)printf("\n");
  }
  (void)printf("disk     ");
  if (!isnan(on->result.disk.write_mb_per_second)) {
    (void)printf(" writes %.0f MB/s", on->result.disk.write_mb_per_second);
  }
  if (!isnan(on->result.disk.read_mb_per_second)) {
    (void)printf(", reads %.0f MB/s", on->result.disk.read_mb_per_second);
  }
  (void)printf("%s%s%s\n", on->result.disk_note[0] != '\0' ? " (" : "", on->result.disk_note,
               on->result.disk_note[0] != '\0' ? ")" : "");
  if (on->result.note[0] != '\0') {
    (void)printf("note      %s\n", on->result.note);
  }
  disturbed_print(on);
  if (isfinite(on->host.context.limits.cpu_cores)) {
    (void)printf("note      a CPU quota of %.4g cores is in these figures\n", on->host.context.limits.cpu_cores);
  }
  (void)printf("with      %s\nwritten   %s\n", on->result.kernels, on->output);
}

static even_status run(profile *on, const char *folder) {
  even_text content = EVEN_TEXT_EMPTY;
  EVEN_TRY(even_host_read(&even_device_source_host, folder, &on->host));
  EVEN_TRY(devices_choose(on));
  EVEN_TRY(measure(on, folder));
  even_status status = even_profile_write(&on->host, &on->chosen, &on->result, &content);
  if (status == EVEN_OK) {
    status = even_file_replace(on->output, even_text_string(&content), content.length);
    if (status != EVEN_OK) {
      (void)even_error_fix("name a file in a folder that you may write to with -o");
    }
  }
  if (status == EVEN_OK && on->json) {
    (void)fputs(even_text_string(&content), stdout);
  } else if (status == EVEN_OK) {
    table_print(on);
  }
  even_text_free(&content);
  return status;
}

static even_status run_in_folder(profile *on) {
  even_text folder = EVEN_TEXT_EMPTY;
  even_disk disk;
  even_status status = output_folder(on->output, &folder);
  if (status == EVEN_OK) { /* before measuring for seconds */
    status = even_disk_read(even_text_string(&folder), &disk);
    if (status != EVEN_OK) {
      (void)even_error_fix("name a file in a folder that exists with -o");
    }
  }
  if (status == EVEN_OK) {
    status = run(on, even_text_string(&folder));
  }
  even_text_free(&folder);
  return status;
}

int even_cli_profile(int argc, char **argv) {
  profile on = {.output = "gpu_profiles.json"};
  const even_option options[] = {
      {0, "devices", EVEN_OPTION_TEXT, &on.devices, "LIST", "only these (cpu:0,cuda:1; default: every core and GPU)", 0,
       0},
      {'o', "output", EVEN_OPTION_TEXT, &on.output, "FILE", "where the profile goes (default: gpu_profiles.json)", 0,
       0},
      {0, "quick", EVEN_OPTION_FLAG, &on.quick, NULL, "measure for a fifth of the time, less exactly", 0, 0},
      {0, "python", EVEN_OPTION_TEXT, &on.python, "PATH", "the interpreter that has torch (default: as for run)", 0, 0},
      {0, "json", EVEN_OPTION_FLAG, &on.json, NULL, "print the profile itself instead of a table", 0, 0},
  };
  const even_usage usage = {
      .command = "profile",
      .synopsis = "evenstep profile [--quick] [--devices LIST] [-o FILE] [--json]",
      .description =
          "Measures each device, one at a time and pinned to itself: fp32 and bf16 matrix products (with torch; in C\n"
          "without it), memory bandwidth, and the disk behind the output file. `evenstep run` starts with shares in\n"
          "proportion to the scores; training then measures on as it goes."};
  int operand = 0;
  int code = 0;
  if (!even_cli_begin(&usage, options, sizeof options / sizeof options[0], argc, argv, 0, "devices go behind --devices",
                      &operand, &code)) {
    return code;
  }
  even_status status = run_in_folder(&on);
  code = status == EVEN_OK ? 0 : even_cli_fail_of(status);
  even_measure_result_free(&on.result);
  even_device_list_free(&on.chosen);
  even_host_free(&on.host);
  return code;
}
