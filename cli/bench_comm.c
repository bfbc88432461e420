/* evenstep bench comm: how fast this host's ranks exchange data, beside Gloo, MPI and the memory itself. */
#include "cli/bench_comm.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "cli/bench.h"
#include "cli/job.h"
#include "cli/python.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/path.h"
#include "os/thread.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { LARGEST_REPORT = 16 << 20 };

typedef struct bench {
  even_job_options job;
  const char *sizes, *collectives, *output, *mpi_pythons;
  int64_t rounds;
  bool no_peers;
  bool json;
  bool save;
  even_text bytes;    /* of --sizes, in numbers */
  even_text python;   /* the interpreter */
  even_text measured; /* the file that rank 0 writes */
  json_t *report;
  json_t *mpi;
  json_t *kept; /* in the table of communication costs, of groups like this one */
  char mpi_note[256];
} bench;

static const even_usage usage = {
    .command = "bench comm",
    .synopsis = "evenstep bench comm [-n N] [--sizes LIST] [--collectives LIST] [--save] [--json]",
    .description =
        "Times the collectives between CPU ranks of this host: Evenstep's own on memory that the ranks share and on\n"
        "any tensor, torch's Gloo, the MPI that is found (mpirun and mpi4py), and what the memory itself allows.\n"
        "Ours, Gloo and the memory take turns in one job; MPI comes after it. Then what is kept of communication "
        "costs\n"
        "of such a group, by which jobs choose engines and ways (EVENSTEP_COMM_COSTS names the file).",
    .epilogue =
        "exit codes:\n"
        "  0 measured; else as of `evenstep run`\n"
        "\n"
        "example:\n"
        "  evenstep bench comm -n 2 --sizes 1K,1M,64M --collectives all_reduce,broadcast",
};

static even_status check(bench *on) {
  EVEN_TRY(even_bench_sizes(on->sizes, &on->bytes));
  EVEN_TRY(even_bench_collectives(on->collectives));
  EVEN_TRY(on->save ? even_bench_costs_check() : EVEN_OK);
  EVEN_TRY(even_cli_python(on->job.python, &on->python));
  even_text_format(&on->measured, "%s/bench-comm.%ld.json", on->job.runs_folder, (long)even_own_process());
  EVEN_TRY(even_text_status(&on->measured));
  even_text relative = on->measured;
  on->measured = (even_text)EVEN_TEXT_EMPTY;
  even_status status = even_path_absolute(even_text_string(&relative), &on->measured);
  even_text_free(&relative);
  return status;
}

/* The words that every way of measuring is given. */
static void common_words(const bench *on, char *rounds, size_t bytes, const char *words[7]) {
  (void)snprintf(rounds, bytes, "%" PRId64, on->rounds);
  const char *const made[7] = {
      "--sizes", even_text_string(&on->bytes), "--collectives", on->collectives, "--rounds", rounds, NULL};
  memcpy(words, made, sizeof made);
}

static int measure_job(bench *on) {
  char rounds[32];
  const char *common[7];
  even_text file = EVEN_TEXT_EMPTY;
  common_words(on, rounds, sizeof rounds, common);
  const char *words[] = {
      "evenstep.bench_comm",   common[0], common[1], common[2], common[3], common[4], common[5], "--peers",
      on->no_peers ? "0" : "1"};
  even_text_format(&file, "EVENSTEP_BENCH_OUT=%s", even_text_string(&on->measured));
  if (even_text_status(&file) != EVEN_OK) {
    even_text_free(&file);
    return even_cli_fail();
  }
  char *environment[] = {file.data, NULL};
  int code = even_job_start(&on->job, environment, sizeof words / sizeof words[0], (char **)(uintptr_t)words);
  even_text_free(&file);
  return code;
}

static even_status read_report(bench *on) {
  even_text text = EVEN_TEXT_EMPTY;
  const char *path = even_text_string(&on->measured);
  even_status status = even_file_read(path, LARGEST_REPORT, &text);
  if (status == EVEN_OK) {
    status = even_json_parse(path, even_text_string(&text), text.length, &on->report);
  }
  even_text_free(&text);
  return status;
}

static void measure_mpi(bench *on) {
  char rounds[32];
  char ranks[32];
  const char *words[7];
  json_t *rank_count = json_object_get(on->report, "ranks");
  common_words(on, rounds, sizeof rounds, words);
  (void)snprintf(ranks, sizeof ranks, "%" JSON_INTEGER_FORMAT, json_integer_value(rank_count));
  const char *pythons = on->mpi_pythons == NULL ? even_text_string(&on->python) : on->mpi_pythons;
  even_bench_mpi(pythons, ranks, (char **)(uintptr_t)words, &on->mpi, on->mpi_note, sizeof on->mpi_note);
}

/* One object: the job's report, with MPI's beside it. */
static even_status show(bench *on) {
  if (json_object_set_new(on->report, "format", json_string("evenstep-bench-comm-1")) != 0 ||
      json_object_set(on->report, "mpi", on->mpi == NULL ? json_null() : on->mpi) != 0 ||
      json_object_set(on->report, "kept", on->kept) != 0) {
    return even_fail(EVEN_ERR_MEMORY, "the report needs more memory than there is");
  }
  char *text = json_dumps(on->report, JSON_INDENT(1));
  if (text == NULL) {
    return even_fail(EVEN_ERR_MEMORY, "the report needs more memory than there is");
  }
  even_status status = EVEN_OK;
  if (on->output != NULL) {
    status = even_file_replace(on->output, text, strlen(text));
  }
  if (on->json) {
    (void)printf("%s\n", text);
  } else {
    even_bench_print(on->report, on->mpi, on->mpi_note);
    even_bench_costs_print(on->report, on->kept);
  }
  free(text);
  return status;
}

/* The figures are shown whatever becomes of the table of costs; then that is the bench's outcome. */
static even_status show_with_costs(bench *on) {
  even_status status = on->save ? even_bench_costs_save(on->report, on->mpi) : EVEN_OK;
  if (status == EVEN_OK) {
    status = even_bench_costs_read(on->report, &on->kept);
  }
  const even_error why = *even_error_last();
  even_status shown = on->kept == NULL && (on->kept = json_array()) == NULL ? EVEN_ERR_MEMORY : show(on);
  if (shown == EVEN_OK && status != EVEN_OK) {
    return even_error_restore(&why);
  }
  return shown;
}

static int run(bench *on) {
  even_status status = check(on);
  status = status == EVEN_OK ? even_cli_check_output(on->output) : status;
  if (status != EVEN_OK) {
    return even_cli_fail_of(status);
  }
  int code = measure_job(on);
  if (code != 0) {
    return code;
  }
  status = read_report(on);
  if (status == EVEN_OK && !on->no_peers) {
    measure_mpi(on);
  }
  if (status == EVEN_OK) {
    status = show_with_costs(on);
  }
  return status == EVEN_OK ? 0 : even_cli_fail_of(status);
}

static void close_bench(bench *on) {
  if (on->measured.length > 0 && even_file_remove(even_text_string(&on->measured)) != EVEN_OK) {
    even_error_clear(); /* it stays in the runs folder; the figures are not worse for it */
  }
  json_decref(on->report);
  json_decref(on->mpi);
  json_decref(on->kept);
  even_text_free(&on->bytes);
  even_text_free(&on->python);
  even_text_free(&on->measured);
}

/* Of a job's options those that mean something here, and our own. */
static size_t declare(bench *on, even_option *table) {
  static const char *const kept[] = {"ranks", "devices", "name", "runs-dir", "cpu-quota", "no-pin", "python"};
  size_t count = even_job_options_declare_some(&on->job, kept, sizeof kept / sizeof kept[0], table);
  even_job_options_tell_two_ranks(table, count);
  const even_option own[] = {
      {0, "sizes", EVEN_OPTION_TEXT, &on->sizes, "LIST", "bytes of an exchange (default 1K,64K,1M,16M,64M)", 0, 0},
      {0, "collectives", EVEN_OPTION_TEXT, &on->collectives, "LIST",
       "all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, send (default all)", 0, 0},
      {0, "rounds", EVEN_OPTION_INTEGER, &on->rounds, "N", "alternating rounds, of which the medians are taken (9)", 1,
       10000},
      {0, "mpi-python", EVEN_OPTION_TEXT, &on->mpi_pythons, "LIST",
       "interpreters, with commas, each with mpi4py of one MPI; the fastest is shown (default the ranks' own)", 0, 0},
      {0, "no-peers", EVEN_OPTION_FLAG, &on->no_peers, NULL, "without Gloo and MPI", 0, 0},
      {0, "save", EVEN_OPTION_FLAG, &on->save, NULL, "keep the figures in the table by which later jobs choose", 0, 0},
      {'o', "output", EVEN_OPTION_TEXT, &on->output, "FILE", "also write the figures there, as JSON", 0, 0},
      {0, "json", EVEN_OPTION_FLAG, &on->json, NULL, "print the figures as JSON instead of a table", 0, 0},
  };
  memcpy(table + count, own, sizeof own);
  return count + sizeof own / sizeof own[0];
}

int even_bench_comm(int argc, char **argv) {
  bench on = {.sizes = "1K,64K,1M,16M,64M",
              .collectives = "all_reduce,reduce_scatter,all_gather,broadcast,all_to_all,send",
              .rounds = 9};
  even_option table[EVEN_JOB_OPTION_ROOM + 8];
  int operand = 0;
  int code = 0;
  even_job_options_defaults(&on.job);
  on.job.ranks = "2";
  size_t count = declare(&on, table);
  if (!even_cli_begin(&usage, table, count, argc, argv, 0, "evenstep bench comm [options]", &operand, &code)) {
    return code;
  }
  on.job.module = true;
  on.job.quiet = true;
  on.job.no_monitor = true;
  on.job.max_restarts = 0;
  on.job.log_rank = "none";
  code = run(&on);
  close_bench(&on);
  return code;
}
