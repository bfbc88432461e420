/* evenstep agent: one host's part of a job of several. `evenstep run --hosts` starts it, over ssh. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "cli/command.h"
#include "cli/job.h"
#include "orchestrator/hosts.h"
#include "os/signals.h"

#include <stdint.h>
#include <string.h>

enum { MOST_LINE = 65536 };

static const even_usage usage = {
    .command = "agent",
    .synopsis = "evenstep agent",
    .description =
        "Starts and watches one host's ranks of a job of several hosts. `evenstep run --hosts` starts it on\n"
        "each of them, and gives it an invitation (one line: where the job is, and its key) on standard\n"
        "input. It is not for people.",
};

/* Byte by byte, and into no buffer of stdio's, which would keep the key: what follows the line is nobody's here. */
static even_status read_invitation(char *line, size_t room) {
  size_t length = 0;
  int byte = 0;
  (void)setvbuf(stdin, NULL, _IONBF, 0);
  while ((byte = getc(stdin)) != EOF && byte != '\n' && length < room - 1) {
    line[length++] = (char)byte;
  }
  line[length] = '\0';
  if (byte != '\n') {
    (void)even_fail(EVEN_ERR_USAGE, "agent: no invitation came on standard input");
    return even_error_fix("`evenstep run --hosts …` starts agents");
  }
  return EVEN_OK;
}

/* Whether its ranks may outlast an agent here: then this process starts it, and another one where it is killed. */
static bool may_outlast(const char *line) {
  json_t *invitation = NULL;
  if (even_json_parse("the leader's invitation", line, strlen(line), &invitation) != EVEN_OK) {
    even_error_clear(); /* whoever reads it for its own sake says so */
    return false;
  }
  bool may = json_is_true(json_object_get(invitation, "outlasts"));
  const char *digits = even_json_text(invitation, "key");
  explicit_bzero((char *)(uintptr_t)digits, strlen(digits));
  json_decref(invitation);
  return may;
}

int even_cli_agent(int argc, char **argv) {
  static char line[MOST_LINE];
  struct even_estate *estate = NULL;
  struct even_legacy *legacy = NULL;
  int operand = 0;
  int code = 0;
  bool met = false;
  if (!even_cli_begin(&usage, NULL, 0, argc, argv, 0, NULL, &operand, &code)) {
    return code;
  }
  even_status status = even_signals_block();
  if (status == EVEN_OK) {
    status = read_invitation(line, sizeof line);
  }
  if (status == EVEN_OK && may_outlast(line) && !even_job_supervise_agent(line, &legacy, &code)) {
    explicit_bzero(line, sizeof line);
    return code;
  }
  if (status == EVEN_OK) {
    status = even_hosts_serve(line, NULL, &met, &estate, legacy, &code);
  }
  explicit_bzero(line, sizeof line); /* the key */
  if (estate != NULL) {
    return even_job_succeed(estate);
  }
  return status == EVEN_OK ? code : even_cli_fail_of(status);
}
