/* Why a rank is slow, by what its host shows; and what /proc and cpufreq say of that. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "device/pressure.h"
#include "monitor/state.h"
#include "monitor/straggler.h"
#include "monitor/verdict.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static even_measure_rank ranks[2];

/* Rank 0 waits half of each step for rank 1; nothing is known of why. */
static even_measure waiting(void) {
  even_measure made = {.phase = EVEN_PHASE_TRAINING,
                       .policy = "auto",
                       .step = 100,
                       .total = 200,
                       .window_steps = 60,
                       .batch = 64,
                       .step_seconds = 0.41,
                       .samples_per_second = 64 / 0.41,
                       .ranks = 2,
                       .rank = ranks};
  for (int r = 0; r < 2; r++) {
    ranks[r] = (even_measure_rank){.device = r == 0 ? "cpu:0" : "cpu:1",
                                   .share_samples = 32,
                                   .busy_seconds = r == 0 ? 0.2 : 0.4,
                                   .throttled_fraction = NAN,
                                   .cpu_cores = NAN,
                                   .communication_bytes = NAN,
                                   .run_wait_fraction = NAN,
                                   .major_faults_per_second = NAN,
                                   .swap_bytes = NAN,
                                   .clock_fraction = NAN,
                                   .gpu_clock_mhz = NAN,
                                   .gpu_celsius = NAN,
                                   .gpu_busy = NAN,
                                   .gpu_others = NAN};
    for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
      ranks[r].spans[span] = NAN;
    }
  }
  even_measure_derive(&made);
  return made;
}

static void expect(const even_measure *measure, even_straggler_cause cause, const char *words, const char *advice) {
  even_straggler found;
  even_verdict verdict;
  even_straggler_find(measure, 1, 0, &found);
  assert_int_equal(found.cause, cause);
  even_verdict_find(measure, &verdict);
  assert_int_equal(verdict.kind, EVEN_VERDICT_IMBALANCE);
  assert_int_equal(verdict.rank, 1);
  assert_int_equal(verdict.cause, cause);
  if (strstr(verdict.limit, words) == NULL || strstr(verdict.advice, advice) == NULL) {
    fail_msg("\"%s\" or \"%s\" not in \"%s\"; \"%s\"", words, advice, verdict.limit, verdict.advice);
  }
}

static void each_cause_is_named_with_its_numbers(void **state) {
  (void)state;
  even_measure measure = waiting();
  expect(&measure, EVEN_STRAGGLER_UNKNOWN, "waits 51% of each step for rank 1 (cpu:1)", "look for what disturbs");
  ranks[1].spans[EVEN_SPAN_DATA] = 0.15;
  ranks[0].spans[EVEN_SPAN_DATA] = 0.01;
  expect(&measure, EVEN_STRAGGLER_DATA, "rank 1 (cpu:1), whose data loading takes 150 ms of each step",
         "its loader is slow, not its device");
  ranks[0].clock_fraction = 0.95;
  ranks[1].clock_fraction = 0.4;
  expect(&measure, EVEN_STRAGGLER_CLOCK, ", whose CPU runs at 40% of its highest clock", "heat");
  ranks[1].run_wait_fraction = 0.6;
  expect(&measure, EVEN_STRAGGLER_CPU_TAKEN, ", which had no CPU 60% of the time that it could have run",
         "other programs take its CPU, or it has more threads than CPUs");
  ranks[1].major_faults_per_second = 400;
  expect(&measure, EVEN_STRAGGLER_PAGE_FAULTS, ", which waits for 400 pages a second from disk", "mapped files");
  ranks[1].swap_bytes = 300e6;
  expect(&measure, EVEN_STRAGGLER_SWAP, ", whose memory is swapped (300 MB out, 400 pages a second back)",
         "too little memory");
  ranks[1].throttled_fraction = 0.75;
  expect(&measure, EVEN_STRAGGLER_QUOTA, ", stopped by its CPU quota 75% of the time", "");
  assert_string_equal(even_straggler_name(EVEN_STRAGGLER_QUOTA), "quota");
  assert_string_equal(even_straggler_name(EVEN_STRAGGLER_UNKNOWN), "unknown");
}

static void what_both_ranks_have_is_no_cause(void **state) {
  (void)state;
  even_measure measure = waiting();
  ranks[0].clock_fraction = 0.45; /* the whole machine saves power */
  ranks[1].clock_fraction = 0.4;
  ranks[0].spans[EVEN_SPAN_DATA] = 0.05;
  ranks[1].spans[EVEN_SPAN_DATA] = 0.06;
  ranks[1].run_wait_fraction = 0.1;
  ranks[1].major_faults_per_second = 3;
  ranks[1].swap_bytes = 300e6; /* out, and not missed */
  ranks[1].throttled_fraction = 0.05;
  expect(&measure, EVEN_STRAGGLER_UNKNOWN, "waits 51% of each step for rank 1 (cpu:1)", "look for what disturbs");
}

static void gpus_have_causes_of_their_own(void **state) {
  (void)state;
  even_measure measure = waiting();
  for (int r = 0; r < 2; r++) {
    ranks[r].device = r == 0 ? "cuda:0" : "cuda:1";
    ranks[r].model = "NVIDIA H200";
    ranks[r].gpu_clock_mhz = 1900;
    ranks[r].gpu_celsius = 60;
    ranks[r].gpu_busy = 0.9;
    ranks[r].gpu_others = 0.05; /* a desktop */
  }
  expect(&measure, EVEN_STRAGGLER_UNKNOWN, "rank 1 (cuda:1)", "look for what disturbs");
  ranks[1].gpu_busy = 0.3;
  expect(&measure, EVEN_STRAGGLER_GPU_IDLE, "rank 1 (cuda:1), whose GPU works 30% of the time (the other one 90%)",
         "its CPU does not keep it busy");
  ranks[1].gpu_clock_mhz = 800; /* low, for it has nothing to do */
  expect(&measure, EVEN_STRAGGLER_GPU_IDLE, "whose GPU works 30%", "");
  ranks[1].run_wait_fraction = 0.6; /* why its CPU does not */
  expect(&measure, EVEN_STRAGGLER_CPU_TAKEN, "which had no CPU 60%", "");
  ranks[1].run_wait_fraction = 0.1;
  ranks[1].gpu_busy = 1;
  expect(&measure, EVEN_STRAGGLER_GPU_CLOCK, ", whose GPU runs at 800 MHz, and the other one at 1900", "nvidia-smi");
  ranks[0].model = "NVIDIA L4"; /* another model's clock says nothing */
  expect(&measure, EVEN_STRAGGLER_UNKNOWN, "rank 1 (cuda:1)", "look for what disturbs");
  ranks[1].gpu_others = 0.6;
  expect(&measure, EVEN_STRAGGLER_GPU_TAKEN, ", whose GPU other processes use 60% of the time", "nvidia-smi pmon");
  ranks[1].gpu_slowed = true;
  ranks[1].gpu_celsius = 92;
  expect(&measure, EVEN_STRAGGLER_GPU_CLOCK, ", whose GPU's clock is held down to 800 MHz (92 degrees)", "heat");
}

/* Without the kernel's count of waiting: a CPU rank that was busy far longer than it ran. */
static void a_rank_without_its_cpu_is_seen_by_its_time_alone(void **state) {
  (void)state;
  even_measure measure = waiting();
  ranks[1].cpu_cores = 0.3;
  expect(&measure, EVEN_STRAGGLER_CPU_TAKEN, "rank 1 (cpu:1)", "it had 30% of one while it was busy 98% of the time");
  ranks[1].device = "numa:1";
  expect(&measure, EVEN_STRAGGLER_CPU_TAKEN, "rank 1 (numa:1)", "it had 30% of one while it was busy 98% of the time");
  ranks[1].device = "cuda:0"; /* whose work is not done by the CPU */
  expect(&measure, EVEN_STRAGGLER_UNKNOWN, "rank 1 (cuda:0)", "look for what disturbs");
}

/* ---- of several causes ---- */

/* Rank 0 takes 0.2 s a step and rank 1 0.4, of the same share; what a cause takes of it is a part of the rank's busy
 * time.
 */
static void make_quota(int rank, double part) {
  ranks[rank].throttled_fraction = part * ranks[rank].busy_seconds / 0.41;
}
static void make_faults(int rank, double part) {
  ranks[rank].major_faults_per_second = part * ranks[rank].busy_seconds / 5e-3 / 0.41;
}
static void make_swap(int rank, double part) {
  ranks[rank].swap_bytes = 300e6;
  make_faults(rank, part);
}
static void make_cpu_taken(int rank, double part) {
  ranks[rank].run_wait_fraction = part;
}
static void make_clock(int rank, double part) {
  ranks[1 - rank].clock_fraction = isfinite(ranks[1 - rank].clock_fraction) ? ranks[1 - rank].clock_fraction : 0.95;
  ranks[rank].clock_fraction = 0.95 * (1 - part);
}
static void make_data(int rank, double part) {
  ranks[rank].spans[EVEN_SPAN_DATA] = part * ranks[1].busy_seconds;
}
static void make_gpu_clock(int rank, double part) {
  for (int r = 0; r < 2; r++) {
    ranks[r].model = "NVIDIA H200";
    ranks[r].gpu_busy = 1;
    ranks[r].gpu_clock_mhz = isfinite(ranks[r].gpu_clock_mhz) ? ranks[r].gpu_clock_mhz : 1900;
  }
  ranks[rank].gpu_clock_mhz = 1900 * (1 - part);
}
static void make_gpu_taken(int rank, double part) {
  ranks[rank].gpu_others = part;
}

static const struct {
  void (*make)(int rank, double part);
  even_straggler_cause cause;
} makes[] = {{make_quota, EVEN_STRAGGLER_QUOTA},         {make_swap, EVEN_STRAGGLER_SWAP},
             {make_faults, EVEN_STRAGGLER_PAGE_FAULTS},  {make_cpu_taken, EVEN_STRAGGLER_CPU_TAKEN},
             {make_clock, EVEN_STRAGGLER_CLOCK},         {make_data, EVEN_STRAGGLER_DATA},
             {make_gpu_clock, EVEN_STRAGGLER_GPU_CLOCK}, {make_gpu_taken, EVEN_STRAGGLER_GPU_TAKEN}};
enum { MAKES = sizeof makes / sizeof makes[0] };

static void expect_cause(const even_measure *measure, even_straggler_cause cause, int first, int second) {
  even_straggler found;
  even_straggler_find(measure, 1, 0, &found);
  if (found.cause != cause) {
    fail_msg("%s, not %s, of %s and %s", even_straggler_name(found.cause), even_straggler_name(cause),
             even_straggler_name(makes[first].cause), even_straggler_name(makes[second].cause));
  }
}

/* Swap is page faults, too: one measure. */
static bool both_are_pages(int one, int other) {
  return makes[one].make != makes[other].make && (makes[one].make == make_swap || makes[one].make == make_faults) &&
         (makes[other].make == make_swap || makes[other].make == make_faults);
}

static void of_two_causes_the_one_that_explains_more_is_told(void **state) {
  (void)state;
  for (int more = 0; more < MAKES; more++) {
    for (int less = 0; less < MAKES; less++) {
      if (more == less || both_are_pages(more, less)) {
        continue;
      }
      even_measure measure = waiting();
      makes[less].make(1, 0.28); /* 56% of what it is behind */
      expect_cause(&measure, makes[less].cause, more, less);
      makes[more].make(1, 0.45);
      expect_cause(&measure, makes[more].cause, more, less);
      makes[more].make(0, 0.45); /* and so has the other rank */
      expect_cause(&measure, makes[less].cause, more, less);
      makes[less].make(0, 0.28);
      expect_cause(&measure, EVEN_STRAGGLER_UNKNOWN, more, less);
    }
  }
}

/* Measured with 0.5 ms of sleep a sample in rank 1's data set, beside busy programs on all cores. */
static void slow_data_on_a_busy_host_is_slow_data(void **state) {
  (void)state;
  even_measure measure = waiting();
  ranks[0].run_wait_fraction = 0.6;
  ranks[0].cpu_cores = 0.35;
  ranks[0].spans[EVEN_SPAN_DATA] = 0.02;
  ranks[1].run_wait_fraction = 0.7; /* each time that it wakes up */
  ranks[1].cpu_cores = 0.1;
  ranks[1].spans[EVEN_SPAN_DATA] = 0.26;
  expect(&measure, EVEN_STRAGGLER_DATA, "rank 1 (cpu:1), whose data loading takes 260 ms of each step", "");
  ranks[1].major_faults_per_second = 60;
  expect(&measure, EVEN_STRAGGLER_DATA, "", "its loader is slow, not its device");
  ranks[1].clock_fraction = 0.3; /* of a CPU that mostly sleeps */
  ranks[0].clock_fraction = 0.9;
  expect(&measure, EVEN_STRAGGLER_DATA, "", "its loader is slow, not its device");
  ranks[0].share_samples = 48; /* shares have moved: it is behind by 0.3 s a step, not by 0.1 */
  ranks[0].busy_seconds = 0.3;
  ranks[0].spans[EVEN_SPAN_DATA] = 0.06;
  ranks[1].throttled_fraction = 0.3;
  ranks[1].share_samples = 16;
  even_measure_derive(&measure);
  even_straggler found;
  even_straggler_find(&measure, 1, 0, &found);
  assert_int_equal(found.cause, EVEN_STRAGGLER_DATA);
}

/* It computes more, on a host where all wait for CPUs as much. */
static void a_busy_host_is_no_cause_of_one_rank(void **state) {
  (void)state;
  even_measure measure = waiting();
  ranks[0].run_wait_fraction = 0.55;
  ranks[1].run_wait_fraction = 0.6;
  ranks[1].throttled_fraction = 0.6; /* of all ranks' container */
  ranks[0].throttled_fraction = 0.3;
  expect(&measure, EVEN_STRAGGLER_UNKNOWN, "waits 51% of each step for rank 1 (cpu:1)", "look for what disturbs");
  ranks[1].run_wait_fraction = 0.8; /* beyond what the other one has */
  expect(&measure, EVEN_STRAGGLER_CPU_TAKEN, ", which had no CPU 80% of the time", "");
  ranks[1].cpu_cores = 0.02; /* but could have run for 41 ms of the step alone */
  expect(&measure, EVEN_STRAGGLER_UNKNOWN, "", "look for what disturbs");
}

/* Measured: eight busy programs on rank 1's CPU, four on both. Rank 0 works for 1.9 ms of a step of 75; its threads
 * wake up meanwhile, and wait for a CPU, too. */
static void a_taken_cpu_on_a_busy_host_is_a_taken_cpu(void **state) {
  (void)state;
  even_measure measure = waiting();
  measure.step_seconds = 0.075;
  ranks[0].busy_seconds = 0.0019;
  ranks[0].run_wait_fraction = 0.78;
  ranks[0].cpu_cores = 0.05;
  ranks[1].busy_seconds = 0.045;
  ranks[1].run_wait_fraction = 0.75;
  ranks[1].cpu_cores = 0.4;
  even_measure_derive(&measure);
  expect(&measure, EVEN_STRAGGLER_CPU_TAKEN, ", which had no CPU 75% of the time", "");
  ranks[1].throttled_fraction = 0.5;
  expect(&measure, EVEN_STRAGGLER_QUOTA, ", stopped by its CPU quota 50% of the time", "");
}

/* A rank that has become slower, and is still no slower than the others. */
static void a_fast_rank_may_be_slower_than_it_was(void **state) {
  (void)state;
  even_measure measure = waiting();
  even_straggler found;
  ranks[0].busy_seconds = 0.41;
  ranks[1].throttled_fraction = 0.6;
  even_straggler_find(&measure, 1, 0, &found);
  assert_int_equal(found.cause, EVEN_STRAGGLER_QUOTA);
  ranks[0].share_samples = 0; /* has nothing to do */
  ranks[0].busy_seconds = NAN;
  even_straggler_find(&measure, 1, 0, &found);
  assert_int_equal(found.cause, EVEN_STRAGGLER_QUOTA);
  even_straggler_find(&measure, 1, 1, &found); /* alone */
  assert_int_equal(found.cause, EVEN_STRAGGLER_QUOTA);
  ranks[1].throttled_fraction = 0;
  even_straggler_find(&measure, 1, 1, &found);
  assert_int_equal(found.cause, EVEN_STRAGGLER_UNKNOWN);
}

static void files_are_read_as_documented(void **state) {
  (void)state;
  assert_float_equal(even_pressure_parse_wait("149121 2267701000 2\n"), 2.267701, 1e-9);
  assert_true(isnan(even_pressure_parse_wait("")));
  assert_true(isnan(even_pressure_parse_wait("149121\n")));
  assert_float_equal(even_pressure_parse_swap("Name:\tpython\nVmRSS:\t 9 kB\nVmSwap:\t    2048 kB\nThreads:\t1\n"),
                     2048.0 * 1024.0, 0);
  assert_true(isnan(even_pressure_parse_swap("Name:\tkthreadd\n")));
}

static void write_number(const char *folder, const char *name, long number) {
  char path[256];
  (void)snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *file = fopen(path, "w");
  assert_non_null(file);
  (void)fprintf(file, "%ld\n", number);
  assert_int_equal(fclose(file), 0);
}

static void clocks_are_a_part_of_the_highest(void **state) {
  (void)state;
  char folder[64] = "/tmp/evenstep-clock-XXXXXX";
  char cpu[96];
  char cpufreq[128];
  char path[192];
  assert_non_null(mkdtemp(folder));
  (void)snprintf(cpu, sizeof cpu, "%s/cpu3", folder);
  (void)snprintf(cpufreq, sizeof cpufreq, "%s/cpufreq", cpu);
  assert_int_equal(mkdir(cpu, 0700), 0);
  assert_int_equal(mkdir(cpufreq, 0700), 0);
  write_number(cpufreq, "cpuinfo_max_freq", 4000000);
  assert_true(isnan(even_pressure_clock(folder, 3)));
  write_number(cpufreq, "scaling_cur_freq", 1000000);
  assert_float_equal(even_pressure_clock(folder, 3), 0.25, 1e-12);
  assert_true(isnan(even_pressure_clock(folder, 2)));
  assert_true(isnan(even_pressure_clock(folder, -1)));
  (void)snprintf(path, sizeof path, "%s/cpuinfo_max_freq", cpufreq);
  assert_int_equal(unlink(path), 0);
  (void)snprintf(path, sizeof path, "%s/scaling_cur_freq", cpufreq);
  assert_int_equal(unlink(path), 0);
  assert_int_equal(rmdir(cpufreq), 0);
  assert_int_equal(rmdir(cpu), 0);
  assert_int_equal(rmdir(folder), 0);
}

static void fractions_are_of_the_time_between_two_looks(void **state) {
  (void)state;
  even_rank_usage before = {.at_ns = 1000000000, .cpu_seconds = 5, .pressure = {2, 100, 1e6, 0.5}};
  even_rank_usage now = {.at_ns = 3000000000, .cpu_seconds = 6.5, .pressure = {2.5, 300, 2e6, 0.9}};
  even_measure_rank rank;
  even_measure_pressure(&before, &now, &rank);
  assert_float_equal(rank.run_wait_fraction, 0.25, 1e-12); /* half a second beside one and a half */
  assert_float_equal(rank.major_faults_per_second, 100, 1e-9);
  assert_float_equal(rank.swap_bytes, 2e6, 0);
  assert_float_equal(rank.clock_fraction, 0.9, 0);
  before.pressure.wait_seconds = NAN; /* a kernel that does not count it */
  even_measure_pressure(&before, &now, &rank);
  assert_true(isnan(rank.run_wait_fraction));
  before.at_ns = 0;
  even_measure_pressure(&before, &now, &rank);
  assert_true(isnan(rank.run_wait_fraction) && isnan(rank.major_faults_per_second));
}

static void this_process_can_be_looked_at(void **state) {
  (void)state;
  even_process_stat stat;
  even_pressure pressure;
  assert_int_equal(even_process_stat_read(0, &stat), 0);
  assert_true(stat.cpu >= 0);
  even_pressure_look(getpid(), &stat, &pressure);
  assert_true(pressure.major_faults >= 0);
  assert_true(isnan(pressure.wait_seconds) || pressure.wait_seconds >= 0);
  assert_true(isnan(pressure.swap_bytes) || pressure.swap_bytes >= 0);
  assert_true(isnan(pressure.clock) || pressure.clock > 0);
  even_pressure_look(0x7ffffffe, &stat, &pressure); /* no such process */
  assert_true(isnan(pressure.wait_seconds) && isnan(pressure.swap_bytes));
  even_error_clear();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(each_cause_is_named_with_its_numbers),
      cmocka_unit_test(what_both_ranks_have_is_no_cause),
      cmocka_unit_test(gpus_have_causes_of_their_own),
      cmocka_unit_test(a_rank_without_its_cpu_is_seen_by_its_time_alone),
      cmocka_unit_test(of_two_causes_the_one_that_explains_more_is_told),
      cmocka_unit_test(slow_data_on_a_busy_host_is_slow_data),
      cmocka_unit_test(a_busy_host_is_no_cause_of_one_rank),
      cmocka_unit_test(a_taken_cpu_on_a_busy_host_is_a_taken_cpu),
      cmocka_unit_test(a_fast_rank_may_be_slower_than_it_was),
      cmocka_unit_test(files_are_read_as_documented),
      cmocka_unit_test(clocks_are_a_part_of_the_highest),
      cmocka_unit_test(fractions_are_of_the_time_between_two_looks),
      cmocka_unit_test(this_process_can_be_looked_at),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
