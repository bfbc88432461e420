/* A host takes the place of a job's leader: the options as they were typed there, made this host's own. */
#include "base/alloc.h"
#include "base/fail.h"
#include "cli/job.h"
#include "cli/job_setup.h"
#include "orchestrator/estate.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/pipe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const even_usage usage = {
    .command = "run",
    .synopsis = "evenstep run",
    .description = "",
    .stop_at_operand = true,
};

/* The terminal is the old leader's: what is said goes to a file of the run folder from now on. */
static even_status redirect(const even_job_options *options) {
  even_text path = EVEN_TEXT_EMPTY;
  int log = -1;
  even_text_format(&path, "%s/%s/logs", options->runs_folder, options->name);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_folder_make(path.data);
  }
  even_text_add(&path, "/leader.log");
  status = status == EVEN_OK ? even_text_status(&path) : status;
  if (status == EVEN_OK) {
    status = even_log_open_private(path.data, &log); /* the page's token is in it */
  }
  even_text_free(&path);
  if (status == EVEN_OK && (dup2(log, STDOUT_FILENO) < 0 || dup2(log, STDERR_FILENO) < 0)) {
    status = even_fail(EVEN_ERR_SYSTEM, "the output of a new leader cannot be kept");
  }
  even_pipe_close(log);
  return status;
}

/* What the old leader's environment said to it, and to its ranks. */
static even_status take_environment(const even_estate *estate) {
  char **lines = NULL;
  size_t count = 0;
  EVEN_TRY(even_estate_words(estate, "environment", &lines, &count));
  for (size_t i = 0; i < count; i++) {
    (void)putenv(lines[i]); /* the estate lives as long as the process leads */
  }
  even_free((void *)lines);
  return EVEN_OK;
}

/* Which rank of its host it is. */
static size_t number_of(const even_job_setup *setup, size_t rank) {
  const char *host = setup->labels == NULL ? NULL : setup->labels[rank];
  size_t number = 0;
  for (size_t i = 0; i < rank && setup->labels != NULL; i++) {
    const char *other = setup->labels[i];
    number += host == NULL ? other == NULL : other != NULL && strcmp(host, other) == 0;
  }
  return setup->labels == NULL ? rank : number;
}

even_status even_job_inherit_quota(const even_estate *estate, size_t places, even_job_setup *setup) {
  bool any = false;
  double *quota = NULL;
  EVEN_TRY(EVEN_NEW_ARRAY(&quota, places));
  for (size_t i = 0; i < places; i++) {
    const char *host = setup->labels == NULL || i >= setup->devices.count ? NULL : setup->labels[i];
    quota[i] = (double)NAN; /* of a spare */
    if (i < setup->devices.count) {
      quota[i] = even_estate_quota(estate, host == NULL ? even_estate_own_name(estate) : host, number_of(setup, i));
    }
    any = any || !isnan(quota[i]);
  }
  if (any) {
    setup->quota = quota;
  } else {
    even_free(quota);
  }
  return EVEN_OK;
}

typedef struct succession {
  even_job_options options;
  char **words;
  size_t count;
  int operand;
  even_text hosts;
} succession;

/* The list of hosts is what is left of it, and what was the old host's own (address, port, what to resume from) is not
 * this one's. */
static even_status read_options(even_estate *estate, succession *one) {
  even_option table[EVEN_JOB_OPTION_ROOM];
  bool helped = false;
  even_job_options_defaults(&one->options);
  size_t known = even_job_options_declare(&one->options, table);
  EVEN_TRY(even_estate_words(estate, "arguments", &one->words, &one->count));
  if (one->count < 3 || strcmp(one->words[1], "run") != 0) {
    return even_fail(EVEN_ERR_UNSUPPORTED, "only jobs of `evenstep run` go on with another leader");
  }
  EVEN_TRY(even_options_parse(&usage, table, known, (int)one->count - 2, one->words + 2, &one->operand, &helped));
  EVEN_TRY(even_estate_hosts(estate, &one->hosts));
  one->options.hosts = one->hosts.data;
  one->options.witness = even_estate_witness(estate);
  one->options.address = NULL;
  one->options.port = 0;
  if (one->options.resume != NULL && strcmp(one->options.resume, "auto") == 0) {
    one->options.resume = NULL; /* the job's own line of checkpoints is handed down */
  }
  one->options.cpu_quota = NULL; /* by the numbers that ranks had at first: even_job_inherit_quota */
  one->options.name = even_estate_text(estate, "run_name");
  one->options.checkpoint_folder = even_estate_text(estate, "checkpoint_folder");
  one->options.python = even_estate_text(estate, "python");
  one->options.estate = estate;
  return EVEN_OK;
}

int even_job_succeed(even_estate *estate) {
  succession one = {.hosts = EVEN_TEXT_EMPTY};
  int code = 0;
  even_status status = read_options(estate, &one);
  if (status == EVEN_OK) {
    status = take_environment(estate);
  }
  if (status == EVEN_OK) {
    status = redirect(&one.options);
  }
  if (status == EVEN_OK) {
    code = even_job_start(&one.options, NULL, one.count - 2 - (size_t)one.operand, one.words + 2 + one.operand);
  } else {
    code = even_cli_fail_of(status);
  }
  even_free((void *)one.words);
  even_text_free(&one.hosts);
  even_estate_free(estate);
  return code;
}
