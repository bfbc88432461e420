/* Families of metrics, each with its type, unit and help, then its samples. */
#include "monitor/metrics.h"

#include "monitor/faults.h"

#include <math.h>
#include <string.h>

static const char *const span_names[EVEN_SPAN_COUNT] = {
#define SPAN_NAME(name, number, words) words,
    EVEN_SPAN_LIST(SPAN_NAME)
#undef SPAN_NAME
};

/* A label's value: backslash, quote and newline are escaped. */
static void label(even_text *out, const char *name, const char *value) {
  even_text_format(out, "%s=\"", name);
  for (const char *at = value; *at != '\0'; at++) {
    if (*at == '\n') {
      even_text_add(out, "\\n");
    } else {
      if (*at == '\\' || *at == '"') {
        even_text_append(out, "\\", 1);
      }
      even_text_append(out, at, 1);
    }
  }
  even_text_append(out, "\"", 1);
}

static void family(even_text *out, const char *name, const char *type, const char *unit, const char *help) {
  even_text_format(out, "# TYPE %s %s\n", name, type);
  if (unit != NULL) {
    even_text_format(out, "# UNIT %s %s\n", name, unit);
  }
  even_text_format(out, "# HELP %s %s\n", name, help);
}

static void single(even_text *out, const char *name, const char *type, const char *unit, const char *help,
                   double value) {
  if (isfinite(value)) {
    family(out, name, type, unit, help);
    even_text_format(out, "%s%s %.17g\n", name, strcmp(type, "counter") == 0 ? "_total" : "", value);
  }
}

typedef double (*of_rank)(const even_state_rank *at, const even_measure_rank *measured);

static void each_rank(even_text *out, const even_state *state, const even_measure *measure, const char *name,
                      const char *type, const char *unit, const char *help, of_rank value_of) {
  family(out, name, type, unit, help);
  for (int r = 0; r < state->ranks; r++) {
    double value = value_of(&state->rank[r], &measure->rank[r]);
    if (isfinite(value)) {
      even_text_format(out, "%s%s{rank=\"%d\",", name, strcmp(type, "counter") == 0 ? "_total" : "", r);
      label(out, "device", state->rank[r].device);
      even_text_format(out, "} %.17g\n", value);
    }
  }
}

static double rank_samples(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return (double)at->samples;
}
static double rank_busy(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return (double)at->busy_ns / 1e9;
}
static double rank_wait(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return (double)at->wait_ns / 1e9;
}
static double rank_share(const even_state_rank *at, const even_measure_rank *measured) {
  (void)at;
  return measured->share_samples;
}
static double rank_wait_ratio(const even_state_rank *at, const even_measure_rank *measured) {
  (void)at;
  return measured->wait_fraction;
}
static double rank_speed(const even_state_rank *at, const even_measure_rank *measured) {
  (void)at;
  return measured->samples_per_busy_second;
}
static double rank_up(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return at->pid != 0 ? 1 : 0;
}
static double rank_cpu(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return at->usage.at_ns != 0 ? at->usage.cpu_seconds : NAN;
}
static double rank_memory(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return at->usage.at_ns != 0 ? at->usage.rss_bytes : NAN;
}
static double rank_throttled(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return at->usage.at_ns != 0 ? at->usage.throttled_seconds : NAN;
}
static double rank_collectives(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return (double)at->calls.now.collectives;
}
static double rank_collective_bytes(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return (double)at->calls.now.bytes;
}
static double rank_bus_bytes(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return (double)at->calls.now.bus_bytes;
}
static double rank_collective_seconds(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return (double)at->calls.now.ns / 1e9;
}
static double rank_collective_wait(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return (double)at->calls.now.wait_ns / 1e9;
}
static double rank_messages(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return (double)at->calls.now.messages;
}
static double rank_message_bytes(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return (double)at->calls.now.message_bytes;
}
/* NAN (left out) of ranks without a GPU. */
static double gpu_value(const even_state_rank *at, double value) {
  return at->gpu.at_ns != 0 ? value : NAN;
}
static double gpu_utilization(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return gpu_value(at, at->gpu.utilization_percent / 100);
}
static double gpu_clock(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return gpu_value(at, at->gpu.clock_mhz * 1e6);
}
static double gpu_temperature(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return gpu_value(at, at->gpu.temperature_celsius);
}
static double gpu_power(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return gpu_value(at, at->gpu.power_watts);
}
static double gpu_memory(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return gpu_value(at, at->gpu.memory_used_bytes);
}
static double rank_bytes(const even_state_rank *at, const even_measure_rank *measured) {
  (void)measured;
  return (double)at->span_bytes[EVEN_SPAN_COMMUNICATION];
}

static void spans(even_text *out, const even_state *state) {
  family(out, "evenstep_rank_span_seconds", "counter", "seconds", "Time in each kind of work; kinds overlap.");
  for (int r = 0; r < state->ranks; r++) {
    for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
      even_text_format(out, "evenstep_rank_span_seconds_total{rank=\"%d\",span=\"%s\"} %.17g\n", r, span_names[span],
                       (double)state->rank[r].span_ns[span] / 1e9);
    }
  }
}

/* As bench/comm says it: what a ring would move over each link, 2 (n - 1) / n times the bytes. */
static void bus_bandwidth(even_text *out, const even_state *state) {
  family(out, "evenstep_rank_bus_bandwidth_bytes_per_second", "gauge", NULL,
         "Gradients reduced over the time that the rank packed and reduced, times 2 (n - 1) / n for n ranks.");
  for (int r = 0; r < state->ranks; r++) {
    double seconds = (double)state->rank[r].span_ns[EVEN_SPAN_COMMUNICATION] / 1e9;
    double links = 2.0 * (state->ranks - 1) / state->ranks;
    if (seconds > 0) {
      even_text_format(out, "evenstep_rank_bus_bandwidth_bytes_per_second{rank=\"%d\"} %.17g\n", r,
                       links * (double)state->rank[r].span_bytes[EVEN_SPAN_COMMUNICATION] / seconds);
    }
  }
}

static void faults(even_text *out, const even_state *state) {
  family(out, "evenstep_faults", "counter", NULL, "What went wrong while all ranks lived, by kind.");
  for (int kind = 0; kind < EVEN_FAULT_COUNT; kind++) {
    even_text_format(out, "evenstep_faults_total{kind=\"%s\"} %llu\n", even_faults_name(kind),
                     (unsigned long long)state->faults[kind].count);
  }
}

static void run_families(even_text *out, const even_state *state, const even_measure *measure) {
  family(out, "evenstep_run", "info", NULL, "The run.");
  even_text_add(out, "evenstep_run_info{");
  label(out, "run", state->run_name);
  even_text_add(out, ",");
  label(out, "policy", state->policy);
  even_text_add(out, "} 1\n");
  single(out, "evenstep_steps", "counter", NULL,
         "Optimizer steps made in this run; those that a restart made anew count again.",
         (double)state->rank[even_state_first(state)].steps);
  single(out, "evenstep_step", "gauge", NULL, "Optimizer steps since the start of training.",
         (double)(measure->step + 1));
  single(out, "evenstep_planned_steps", "gauge", NULL, "Steps that the run will make.",
         measure->total > 0 ? (double)measure->total : NAN);
  single(out, "evenstep_samples", "counter", NULL, "Samples trained on by all ranks in this run.",
         (double)measure->samples_total);
  single(out, "evenstep_attempt", "gauge", NULL, "Restarts so far.", measure->attempt);
  single(out, "evenstep_loss", "gauge", NULL, "Loss of the last step, mean over the global batch.", measure->loss);
  single(out, "evenstep_step_seconds", "gauge", "seconds", "Time of a step, mean over the last steps.",
         measure->step_seconds);
  single(out, "evenstep_predicted_step_seconds", "gauge", "seconds", "Time of a step that the balancer predicted.",
         measure->predicted_step_seconds);
  single(out, "evenstep_throughput_samples_per_second", "gauge", NULL, "Samples per second over the last steps.",
         measure->samples_per_second);
  single(out, "evenstep_best_throughput_samples_per_second", "gauge", NULL,
         "Sum of the ranks' samples per busy second: what no split can exceed.", measure->best_samples_per_second);
  single(out, "evenstep_efficiency_ratio", "gauge", "ratio", "Throughput over the best possible.", measure->efficiency);
  single(out, "evenstep_remaining_seconds", "gauge", "seconds", "Time until the last step.", measure->eta_seconds);
  single(out, "evenstep_checkpoints", "counter", NULL, "Checkpoints completed.", (double)state->checkpoints);
  single(out, "evenstep_lost_records", "counter", NULL, "Telemetry records overwritten before they were read.",
         (double)measure->lost_records);
}

void even_monitor_metrics(even_state *state, uint64_t now_ns, even_text *out) {
  even_measure measure;
  even_state_measure(state, now_ns, &measure);
  run_families(out, state, &measure);
#define EACH(name, type, unit, help, value) each_rank(out, state, &measure, name, type, unit, help, value)
  EACH("evenstep_rank_up", "gauge", NULL, "1 while the rank's process runs.", rank_up);
  EACH("evenstep_rank_samples", "counter", NULL, "Samples trained on by the rank.", rank_samples);
  EACH("evenstep_rank_share_samples", "gauge", "samples", "The rank's samples of a step, mean over the last steps.",
       rank_share);
  EACH("evenstep_rank_busy_seconds", "counter", "seconds", "Time the rank worked.", rank_busy);
  EACH("evenstep_rank_wait_seconds", "counter", "seconds", "Time the rank stood still in steps.", rank_wait);
  EACH("evenstep_rank_wait_ratio", "gauge", "ratio", "Part of the last steps in which the rank stood still.",
       rank_wait_ratio);
  EACH("evenstep_rank_speed_samples_per_second", "gauge", NULL, "Samples per busy second over the last steps.",
       rank_speed);
  EACH("evenstep_rank_communication_bytes", "counter", "bytes", "Bytes of gradients reduced.", rank_bytes);
  EACH("evenstep_rank_cpu_seconds", "counter", "seconds", "CPU time of the rank's process in this attempt.", rank_cpu);
  EACH("evenstep_rank_resident_memory_bytes", "gauge", "bytes", "Resident memory of the rank's process.", rank_memory);
  EACH("evenstep_rank_throttled_seconds", "counter", "seconds", "Time the rank's CPU quota stopped it.",
       rank_throttled);
  EACH("evenstep_rank_collectives", "counter", NULL, "Collectives of recorded groups, those of es.prepare among them.",
       rank_collectives);
  EACH("evenstep_rank_collective_bytes", "counter", "bytes", "Their bytes, as nccl-tests counts them.",
       rank_collective_bytes);
  EACH("evenstep_rank_collective_bus_bytes", "counter", "bytes",
       "The same, times nccl-tests' bus factor; its rate over that of seconds less wait is the bus bandwidth.",
       rank_bus_bytes);
  EACH("evenstep_rank_collective_seconds", "counter", "seconds", "Time inside them.", rank_collective_seconds);
  EACH("evenstep_rank_collective_wait_seconds", "counter", "seconds", "Of it, waiting for peers.",
       rank_collective_wait);
  EACH("evenstep_rank_messages", "counter", NULL, "Messages sent and received by recorded groups.", rank_messages);
  EACH("evenstep_rank_message_bytes", "counter", "bytes", "Their bytes.", rank_message_bytes);
  EACH("evenstep_rank_gpu_utilization_ratio", "gauge", "ratio", "Part of the last moments in which the GPU worked.",
       gpu_utilization);
  EACH("evenstep_rank_gpu_clock_hertz", "gauge", "hertz", "Clock of the GPU's multiprocessors.", gpu_clock);
  EACH("evenstep_rank_gpu_temperature_celsius", "gauge", "celsius", "Temperature of the GPU.", gpu_temperature);
  EACH("evenstep_rank_gpu_power_watts", "gauge", "watts", "Power that the GPU takes.", gpu_power);
  EACH("evenstep_rank_gpu_memory_used_bytes", "gauge", "bytes", "Memory of the GPU in use, by anybody.", gpu_memory);
#undef EACH
  spans(out, state);
  bus_bandwidth(out, state);
  faults(out, state);
  even_text_add(out, "# EOF\n");
}
