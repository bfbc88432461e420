/* evenstep join: this host takes part in a job that runs already. */
#include "base/fail.h"
#include "base/json_writer.h"
#include "cli/command.h"
#include "cli/job.h"
#include "cli/job_setup.h"
#include "orchestrator/hosts.h"
#include "os/signals.h"
#include "os/socket.h"

#include <stdlib.h>
#include <string.h>

static const even_usage usage = {
    .command = "join",
    .synopsis = "evenstep join [options] ADDRESS[,ADDRESS…]:PORT",
    .description =
        "This host takes part in a job that runs already, and was started with --max-ranks: the training\n"
        "saves its state after the step under way, and goes on with this host's ranks, too; with --recovery\n"
        "shrink or replace they join while the others train. ADDRESS:PORT is what `evenstep run` said. Where\n"
        "another host can take its place, each host of the job answers at that port, and says who leads;\n"
        "of several addresses one that answers is enough, and while another host takes the lead they are\n"
        "asked again, for 20 s and four times the job's EVENSTEP_HOST_TIMEOUT. The job's key is in\n"
        "EVENSTEP_JOB_KEY, or in the file that EVENSTEP_JOB_KEY_FILE names. Runs until the job ends, or this\n"
        "host is drained; Ctrl-C asks for that, and once more leaves at once.",
    .epilogue =
        "exit codes:\n"
        "  0 the job has ended, or goes on without this host; 7 the job was lost, or its agent not reached;\n"
        "  5 the key is another one; 8 the job refuses this host: the reason is told\n"
        "\n"
        "examples:\n"
        "  EVENSTEP_JOB_KEY_FILE=key evenstep join 10.0.0.1:7000\n"
        "  EVENSTEP_JOB_KEY_FILE=key evenstep join -n 4 node1,node2,node3:7000",
};

static even_status no_place(const char *word) {
  (void)even_fail(EVEN_ERR_USAGE, "join: %s is no ADDRESS:PORT", word);
  return even_error_fix("give what `evenstep run --max-ranks` says: 10.0.0.1:7000, or a name in the address's place");
}

/* Those of one name. */
static even_status add_name(const char *at, size_t length, even_json *json) {
  char name[256];
  even_socket_addresses addresses;
  if (length == 0 || length >= sizeof name) {
    (void)(length == 0 ? even_fail(EVEN_ERR_USAGE, "join: a name is missing beside a comma")
                       : even_fail(EVEN_ERR_USAGE, "join: %.40s… is too long for the name of a host", at));
    return even_error_fix("give addresses or names, with one port behind the last: node1,node2:7000");
  }
  memcpy(name, at, length);
  name[length] = '\0';
  if (even_socket_resolve(name, &addresses) != EVEN_OK) {
    return even_error_fix("`getent hosts %s` says whether this host knows the name; an address does as well", name);
  }
  for (size_t i = 0; i < addresses.count; i++) {
    even_json_string(json, NULL, addresses.items[i]);
  }
  return EVEN_OK;
}

/* NAME,NAME:PORT: one host that is there is enough. */
static even_status add_addresses(const char *word, even_json *json) {
  char *end = NULL;
  const char *colon = strrchr(word, ':');
  long port = colon == NULL ? 0 : strtol(colon + 1, &end, 10);
  if (colon == NULL || colon == word || end == colon + 1 || *end != '\0' || port < 1 || port > 65535) {
    return no_place(word);
  }
  even_status first = EVEN_OK;
  bool any = false;
  even_json_integer(json, "port", port);
  even_json_integer(json, "listens", port); /* this host will answer there, too */
  even_json_array(json, "addresses");
  for (const char *at = word; at < colon;) {
    size_t length = strcspn(at, ",");
    length = length < (size_t)(colon - at) ? length : (size_t)(colon - at);
    even_status status = add_name(at, length, json);
    any = any || status == EVEN_OK;
    first = first == EVEN_OK ? status : first;
    at += length + 1;
  }
  even_json_array_end(json);
  if (any) {
    even_error_clear();
  }
  return any ? EVEN_OK : first;
}

static even_status read_key(char key[EVEN_KEY_DIGITS + 1]) {
  EVEN_TRY(even_job_key_read(key));
  if (key[0] == '\0') {
    (void)even_fail(EVEN_ERR_USAGE, "join: this host does not have the job's key");
    return even_error_fix("EVENSTEP_JOB_KEY_FILE=FILE, a copy (mode 0600) of the one that the job was started with");
  }
  return EVEN_OK;
}

static even_status write_invitation(const char *word, const char *key, double patience, even_text *out) {
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "key", key);
  even_json_integer(&json, "host", 0);
  even_json_number(&json, "patience_seconds", patience);
  EVEN_TRY(add_addresses(word, &json));
  even_json_object_end(&json);
  return even_text_status(out);
}

/* No address answered as a leader does: whatever the kernel calls that. */
static even_status not_reached(void) {
  (void)even_error_means(EVEN_ERR_PEER_LOST);
  return even_error_fix(
      "does the job run, with --max-ranks, and do its host's firewall and routes let this one come? "
      "Where it listens it said when it began");
}

static even_status join(const char *word, int ranks, struct even_estate **estate, int *code) {
  char key[EVEN_KEY_DIGITS + 1] = "";
  const even_join_wish wish = {.ranks = ranks, .taken = even_cli_say};
  even_text line = EVEN_TEXT_EMPTY;
  bool met = false;
  EVEN_TRY(read_key(key));
  even_status status = write_invitation(word, key, 0, &line);
  if (status == EVEN_OK) {
    status = even_signals_block();
  }
  if (status == EVEN_OK) {
    status = even_hosts_serve(line.data, &wish, &met, estate, NULL, code);
    if (status == EVEN_ERR_PERMISSION) {
      (void)even_error_fix("give this host the job's key");
    } else if (!met && (status == EVEN_ERR_SYSTEM || status == EVEN_ERR_TIMEOUT)) {
      status = not_reached();
    }
  }
  explicit_bzero(key, sizeof key);
  if (line.data != NULL) {
    explicit_bzero(line.data, line.length);
  }
  even_text_free(&line);
  return status;
}

int even_cli_join(int argc, char **argv) {
  int64_t ranks = 0;
  struct even_estate *estate = NULL;
  const even_option options[] = {
      {'n', "ranks", EVEN_OPTION_INTEGER, &ranks, "N",
       "ranks here (default: one a GPU, or without any one a NUMA node, as many as the job takes)", 1, 4096},
  };
  int operand = 0;
  int code = 0;
  if (!even_cli_begin(&usage, options, sizeof options / sizeof options[0], argc, argv, 1, NULL, &operand, &code)) {
    return code;
  }
  if (operand >= argc) {
    return even_cli_fail_of(no_place("nothing"));
  }
  even_status status = join(argv[operand], (int)ranks, &estate, &code);
  if (estate != NULL) {
    return even_job_succeed(estate);
  }
  if (status != EVEN_OK) {
    return even_cli_fail_of(status);
  }
  if (even_signals_end_pending() != 0) {
    return 128 + even_signals_end_pending();
  }
  even_cli_say(NULL, "the job has ended, or goes on without this host");
  return code;
}
