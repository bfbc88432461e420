/* The Python process that measures with torch. */
#include "device/torch/worker.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Importing torch takes 2 to 5 seconds, far more from a cold network disk. */
enum { READY_MS = 180000, ANSWER_MS = 60000 };

even_status even_torch_worker_start(const char *python, even_torch_worker *out) {
  char interpreter[4096];
  char option[] = "-m";
  char module[] = "evenstep.profile_worker";
  char *arguments[] = {interpreter, option, module, NULL};
  out->running = false;
  out->version[0] = '\0';
  (void)snprintf(interpreter, sizeof interpreter, "%s", python);
  EVEN_TRY(even_dialogue_start(arguments, &out->dialogue));
  out->running = true;
  return EVEN_OK;
}

/* The worker's next line as JSON; a worker that died is ended here. */
static even_status answer_read(even_torch_worker *worker, int64_t timeout_ms, json_t **out) {
  const char *line = NULL;
  char complaint[256];
  *out = NULL;
  even_status status = even_dialogue_hear(&worker->dialogue, timeout_ms, &line);
  if (status == EVEN_OK && line == NULL) {
    even_dialogue_complaint(&worker->dialogue, complaint, sizeof complaint);
    status = even_fail(EVEN_ERR_NOT_FOUND, "%s", complaint[0] != '\0' ? complaint : "the measuring process died");
  }
  if (status == EVEN_OK) {
    status = even_json_parse("the measuring process's answer", line, strlen(line), out);
  }
  if (status != EVEN_OK) {
    even_torch_worker_end(worker);
  }
  return status;
}

even_status even_torch_worker_ready(even_torch_worker *worker) {
  json_t *answer = NULL;
  EVEN_TRY(answer_read(worker, READY_MS, &answer));
  const char *version = json_string_value(json_object_get(answer, "torch"));
  (void)snprintf(worker->version, sizeof worker->version, "%s", version != NULL ? version : "of unknown version");
  json_decref(answer);
  return EVEN_OK;
}

static even_status request_write(const even_device *device, size_t threads, double seconds, even_text *out) {
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "name", device->name);
  even_json_string(&json, "kind", device->kind == EVEN_DEVICE_CUDA ? "cuda" : "cpu");
  even_json_integer(&json, "index", device->cuda_index);
  even_json_unsigned(&json, "threads", threads);
  even_json_number(&json, "seconds", seconds);
  even_json_array(&json, "cpus");
  for (size_t i = 0; i < device->cpu_count; i++) {
    even_json_integer(&json, NULL, device->cpus[i]);
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
  return even_text_status(out);
}

static double figure(const json_t *answer, const char *name) {
  const json_t *value = json_object_get(answer, name);
  return json_is_number(value) && json_number_value(value) > 0 ? json_number_value(value) : NAN;
}

static even_status speed_read(const json_t *answer, const even_device *device, even_torch_speed *out) {
  const char *error = json_string_value(json_object_get(answer, "error"));
  if (error != NULL) {
    return even_fail(EVEN_ERR_DEVICE, "torch cannot measure %s: %.300s", device->name, error);
  }
  *out = (even_torch_speed){
      .matmul_fp32_gflops = figure(answer, "matmul_fp32_gflops"),
      .matmul_bf16_gflops = figure(answer, "matmul_bf16_gflops"),
      .memory_bandwidth_gb_per_second = figure(answer, "memory_bandwidth_gb_per_second"),
      .memory_read_gb_per_second = figure(answer, "memory_read_gb_per_second"),
  };
  if (isnan(out->matmul_fp32_gflops)) {
    return even_fail(EVEN_ERR_DEVICE, "torch gave no speed for %s", device->name);
  }
  return EVEN_OK;
}

even_status even_torch_worker_measure(even_torch_worker *worker, const even_device *device, size_t threads,
                                      double seconds, even_torch_speed *out) {
  even_text request = EVEN_TEXT_EMPTY;
  json_t *answer = NULL;
  even_status status = request_write(device, threads, seconds, &request);
  if (status == EVEN_OK) {
    status = even_dialogue_say(&worker->dialogue, even_text_string(&request));
  }
  even_text_free(&request);
  EVEN_TRY(status);
  EVEN_TRY(answer_read(worker, ANSWER_MS + (int64_t)(seconds * 10000), &answer));
  status = speed_read(answer, device, out);
  json_decref(answer);
  return status;
}

void even_torch_worker_end(even_torch_worker *worker) {
  if (worker->running) {
    even_dialogue_end(&worker->dialogue);
    worker->running = false;
  }
}
