/* --hosts: the list as the user typed it, and the way there. */
#include "base/alloc.h"
#include "base/fail.h"
#include "cli/job_aside.h"
#include "cli/job_setup.h"
#include "cli/shell_words.h"
#include "orchestrator/voter.h"
#include "os/path.h"
#include "os/socket.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS_A_HOST = 1024 };

/* For many hosts over a slow ssh, and imports from a cold network disk. */
static const double PATIENCE_SECONDS = 120;
static const double MOST_PATIENCE_SECONDS = 3600;
static const double MAJORITY_SECONDS = 300;
static const double MOST_MAJORITY_SECONDS = 86400;
static const double MOST_LEAST_SECONDS = 2592000;

/* A variable; where it is not set *seconds stays. */
static even_status read_patience(const char *name, const char *what, double least, double most, double *seconds) {
  const char *text = getenv(name);
  char *end = NULL;
  if (text == NULL || text[0] == '\0') {
    return EVEN_OK;
  }
  *seconds = strtod(text, &end);
  if (*end != '\0' || !(*seconds >= least && *seconds <= most)) {
    (void)even_fail(EVEN_ERR_USAGE, "%s=%.100s is no time to wait for %s", name, text, what);
    return even_error_fix("give seconds, from %.0f to %.0f", least, most);
  }
  return EVEN_OK;
}

even_status even_job_patience(double *seconds) {
  *seconds = PATIENCE_SECONDS;
  return read_patience("EVENSTEP_HOSTS_PATIENCE", "hosts", 1, MOST_PATIENCE_SECONDS, seconds);
}

/* How long what is left of a job waits where it hears no majority of the hosts: unless somebody says it, longer than
 * another one takes to lead and to start ranks; */
static even_status read_majority_patience(double silence, double *seconds) {
  *seconds = 3 * silence > MAJORITY_SECONDS ? 3 * silence : MAJORITY_SECONDS;
  return read_patience("EVENSTEP_MAJORITY_PATIENCE", "a majority of the hosts", 1, MOST_MAJORITY_SECONDS, seconds);
}

/* and where it has fewer ranks than --min-ranks. */
static even_status read_least_patience(double *seconds) {
  *seconds = (double)NAN; /* as even_elastic_patience says */
  return read_patience("EVENSTEP_MIN_RANKS_PATIENCE", "enough ranks", 0, MOST_LEAST_SECONDS, seconds);
}

/* A host whose leader is lost waits for no longer than that: within less than 2 S another one may not lead yet. */
static even_status check_majority_patience(double silence, double seconds) {
  const double hosts = silence > 0 ? silence : (double)EVEN_SOCKET_SILENCE_MS * 1e-3;
  if (seconds >= 2 * hosts) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_USAGE,
                  "EVENSTEP_MAJORITY_PATIENCE=%.100s is too short: hosts are lost after %.4g s of silence "
                  "(EVENSTEP_HOST_TIMEOUT), and what is left would end before another one leads",
                  getenv("EVENSTEP_MAJORITY_PATIENCE"), hosts);
  return even_error_fix("give %.4g s or more, twice as long", 2 * hosts);
}

/* What becomes of the job where a lost host cannot be reached, and there is no --min-ranks. */
static even_status read_lost_host(even_lost_host *lost) {
  static const char *const names[] = {[EVEN_LOST_GO_ON] = "go-on", [EVEN_LOST_WAIT] = "wait", [EVEN_LOST_END] = "end"};
  const char *text = getenv("EVENSTEP_LOST_HOST");
  *lost = EVEN_LOST_GO_ON;
  if (text == NULL || text[0] == '\0') {
    return EVEN_OK;
  }
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    if (strcmp(text, names[i]) == 0) {
      *lost = (even_lost_host)i;
      return EVEN_OK;
    }
  }
  (void)even_fail(EVEN_ERR_USAGE, "EVENSTEP_LOST_HOST=%.100s is nothing that a job does without a lost host", text);
  return even_error_fix("give go-on, wait or end");
}

/* After how long a silent host is lost. One that takes a leader's place has heard it from that one. */
static even_status read_silence(const even_job_options *options, double *seconds) {
  const char *text = getenv("EVENSTEP_HOST_TIMEOUT");
  const double least = (double)EVEN_SOCKET_SHORTEST_SILENCE_MS * 1e-3;
  const double most = (double)EVEN_SOCKET_LONGEST_SILENCE_MS * 1e-3;
  char *end = NULL;
  *seconds = 0;
  if (text == NULL || text[0] == '\0' || options->estate != NULL) {
    return EVEN_OK;
  }
  *seconds = strtod(text, &end);
  if (*end == '\0' && *seconds >= 0 && *seconds < least) {
    (void)even_fail(EVEN_ERR_USAGE,
                    "EVENSTEP_HOST_TIMEOUT=%.100s is too short: the kernel asks a silent host once a second whether it "
                    "lives, and a slow answer would be taken for a lost host",
                    text);
    return even_error_fix("give %.0f s or more", least);
  }
  if (*end != '\0' || !(*seconds >= least && *seconds <= most)) {
    (void)even_fail(EVEN_ERR_USAGE, "EVENSTEP_HOST_TIMEOUT=%.100s is no time after which a silent host is lost", text);
    return even_error_fix("give seconds, from %.0f to %.0f", least, most);
  }
  return EVEN_OK;
}

static even_status bad_list(const char *list, const char *why) {
  even_status status = even_fail(EVEN_ERR_USAGE, "--hosts %s: %s", list, why);
  (void)even_error_fix(
      "give names as ssh takes them, this host first, each with its number of ranks where -n does not "
      "say it: --hosts here:4,there:2");
  return status;
}

static even_status read_host(const char *list, const char *at, size_t length, int ranks, even_host_wish *out) {
  size_t name = strcspn(at, ":,");
  *out = (even_host_wish){.ranks = ranks};
  if (!even_hosts_is_name(at, name)) {
    return bad_list(list, "not the name of a host");
  }
  memcpy(out->name, at, name);
  if (name < length) {
    char *end = NULL;
    errno = 0;
    long wish = strtol(at + name + 1, &end, 10);
    if (errno != 0 || end != at + length || end == at + name + 1 || wish < 1 || wish > MOST_RANKS_A_HOST) {
      return bad_list(list, "not a number of ranks");
    }
    out->ranks = (int)wish;
  }
  return EVEN_OK;
}

even_status even_job_read_hosts(const char *list, int ranks, even_host_wish **out, size_t *count) {
  const char *at = list;
  *out = NULL;
  *count = 0;
  for (;;) {
    size_t length = strcspn(at, ",");
    if (*count == EVEN_HOSTS_MOST) {
      return bad_list(list, "too many hosts");
    }
    EVEN_TRY(even_realloc((void **)out, *count + 1, sizeof **out));
    EVEN_TRY(read_host(list, at, length, ranks, &(*out)[*count]));
    for (size_t i = 0; i < *count; i++) {
      if (strcmp((*out)[i].name, (*out)[*count].name) == 0) {
        return bad_list(list, "a host is named twice");
      }
    }
    (*count)++;
    if (at[length] == '\0') {
      return EVEN_OK;
    }
    at += length + 1;
  }
}

/* Also by the first part of a long name: "node1" of "node1.cluster". */
static bool is_called(const even_host_wish *host, const char *own) {
  const char *at = strchr(host->name, '@');
  const char *name = at == NULL ? host->name : at + 1;
  size_t length = strcspn(name, ".");
  return strcspn(own, ".") == length && strncmp(name, own, length) == 0;
}

/* The first host is this one, whatever it is called: with another order its ranks and another one's share this host. */
static void warn_of_order(const even_host_wish *hosts, size_t count) {
  char own[EVEN_HOSTS_NAME];
  char words[4 * EVEN_HOSTS_NAME + 200];
  even_host_name(own, sizeof own);
  for (size_t i = 1; i < count && !is_called(&hosts[0], own); i++) {
    if (is_called(&hosts[i], own)) {
      (void)snprintf(words, sizeof words,
                     "warning: this host is called %s, which --hosts names behind %s: the first one stands for this "
                     "host, so ranks of both are started here, and none on a host %s; name this host first",
                     own, hosts[0].name, hosts[0].name);
      even_cli_say(NULL, words);
    }
  }
}

even_status even_job_first_host(const even_job_options *options, int ranks, int *first) {
  even_host_wish *hosts = NULL;
  size_t count = 0;
  *first = ranks;
  if (options->hosts == NULL || options->launched != NULL) {
    return EVEN_OK;
  }
  even_status status = even_job_read_hosts(options->hosts, ranks, &hosts, &count);
  if (status == EVEN_OK) {
    *first = hosts[0].ranks;
  }
  even_free(hosts);
  return status;
}

/* Behind the others. Of three hosts and more these vote themselves. */
static even_status add_witness(const even_job_options *options, even_host_wish **out, size_t *count) {
  size_t length = strlen(options->witness);
  if (options->launched != NULL || (*count != 2 && options->estate == NULL)) {
    (void)even_fail(EVEN_ERR_USAGE, "--witness is of two hosts that --hosts names");
    return even_error_fix("leave it out: of three hosts and more, --replace-leader has three vote, or five");
  }
  if (!even_hosts_is_name(options->witness, length) || strchr(options->witness, ',') != NULL) {
    (void)even_fail(EVEN_ERR_USAGE, "--witness %s: not the name of a host", options->witness);
    return even_error_fix("give one name as ssh takes it");
  }
  for (size_t i = 0; i < *count; i++) {
    if (strcmp((*out)[i].name, options->witness) == 0) {
      (void)even_fail(EVEN_ERR_USAGE, "--witness %s has ranks, too", options->witness);
      return even_error_fix("name a third machine: with it, either of the two can be lost");
    }
  }
  EVEN_TRY(even_realloc((void **)out, *count + 1, sizeof **out));
  (*out)[*count] = (even_host_wish){.ranks = 1, .witness = true};
  memcpy((*out)[(*count)++].name, options->witness, length + 1);
  return EVEN_OK;
}

/* One for each process that was started; all but this one's are known when they come. */
static even_status make_wishes(const even_launched *launched, int ranks, even_host_wish **out, size_t *count) {
  EVEN_TRY(EVEN_NEW_ARRAY(out, (size_t)launched->count));
  *count = (size_t)launched->count;
  for (size_t i = 0; i < *count; i++) {
    even_host_wish *wish = &(*out)[i];
    wish->ranks = ranks;
    if (i == 0) {
      even_host_name(wish->name, sizeof wish->name);
    } else if (launched->hosts.count > 0) {
      (void)snprintf(wish->name, sizeof wish->name, "%s", launched->hosts.names[i]);
    } else {
      (void)snprintf(wish->name, sizeof wish->name, "number %zu", i);
    }
  }
  return EVEN_OK;
}

/* This host alone, which others may join. */
static even_status make_own_wish(int ranks, even_host_wish **out, size_t *count) {
  EVEN_TRY(EVEN_NEW(out));
  *count = 1;
  (*out)->ranks = ranks;
  even_host_name((*out)->name, sizeof(*out)->name);
  return EVEN_OK;
}

even_status even_job_check_hosts(const even_job_options *options) {
  if (options->devices != NULL) {
    (void)even_fail(EVEN_ERR_USAGE, "--devices names devices of this host, and %s",
                    options->hosts != NULL ? "--hosts of several" : "--max-ranks lets others join");
    return even_error_fix("leave out one of the two");
  }
  if (options->max_ranks == 0 && options->join_port != 0) {
    (void)even_fail(EVEN_ERR_USAGE, "--join-port is of --max-ranks");
    return even_error_fix("say up to how many ranks hosts may join");
  }
  if (options->replace_leader && options->keep_leader) {
    (void)even_fail(EVEN_ERR_USAGE, "--replace-leader and --no-replace-leader");
    return even_error_fix("leave out one of the two");
  }
  if ((options->launched == NULL ? options->rendezvous : options->ssh) != NULL) {
    (void)even_fail(EVEN_ERR_USAGE, "%s --hosts auto",
                    options->launched == NULL ? "--rendezvous is of" : "--ssh is not of");
    return even_error_fix("leave out one of the two");
  }
  return EVEN_OK;
}

static even_status check_alone(const even_job_options *options) {
  bool joined = options->max_ranks > 0;
  if (options->ssh == NULL && (joined || options->address == NULL) && options->rendezvous == NULL &&
      !options->replace_leader && options->witness == NULL && options->checkpoint_copies == 0 &&
      options->memory_copies <= 0 && (joined || options->join_port == 0)) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_USAGE, "%s is of several hosts, and no --hosts names them",
                  options->ssh != NULL              ? "--ssh"
                  : options->address != NULL        ? "--address"
                  : options->rendezvous != NULL     ? "--rendezvous"
                  : options->witness != NULL        ? "--witness"
                  : options->replace_leader         ? "--replace-leader"
                  : options->join_port != 0         ? "--join-port"
                  : options->checkpoint_copies != 0 ? "--checkpoint-copies"
                                                    : "--memory-copies");
  return even_error_fix("name the hosts, or leave it out");
}

static even_status split_shell(char *text, char **words) {
  size_t count = 0;
  if (even_shell_words_split(text, words, EVEN_JOB_SHELL_WORDS, &count) != EVEN_OK) {
    return even_error_prefix("--ssh");
  }
  return count > 0 ? EVEN_OK : even_fail(EVEN_ERR_USAGE, "--ssh is empty");
}

static even_status find_program(even_text *out) {
  static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-+@%/=,";
  EVEN_TRY(even_program_path(out));
  if (strspn(out->data, plain) != out->length) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "%s has a path that a shell on another host would take apart", out->data);
    return even_error_fix("install evenstep in a folder without blanks and signs in its path");
  }
  return EVEN_OK;
}

/* Ends without the "/" that even_path_absolute leaves. */
static even_status find_folder(even_text *out) {
  EVEN_TRY(even_path_absolute("./", out));
  while (out->length > 1 && out->data[out->length - 1] == '/') {
    out->data[--out->length] = '\0';
  }
  return EVEN_OK;
}

even_status even_job_find_way(const even_job_options *options, even_job_way *way) {
  const char *variable = getenv("EVENSTEP_SSH");
  const char *shell = options->ssh != NULL                      ? options->ssh
                      : variable != NULL && variable[0] != '\0' ? variable
                                                                : "ssh -o BatchMode=yes -o ControlPath=none";
  if (options->launched != NULL) {
    EVEN_TRY(even_job_meet(options, &way->rendezvous, way->key));
    EVEN_TRY(even_rendezvous_check(&way->rendezvous, options->launched));
    EVEN_TRY(even_program_path(&way->program));
    return find_folder(&way->folder);
  }
  EVEN_TRY(even_duplicate(shell, &way->shell));
  EVEN_TRY(split_shell(way->shell, way->words));
  EVEN_TRY(find_program(&way->program));
  return find_folder(&way->folder);
}

void even_job_way_free(even_job_way *way) {
  even_free(way->shell);
  even_rendezvous_free(&way->rendezvous);
  explicit_bzero(way->key, sizeof way->key);
  even_text_free(&way->program);
  even_text_free(&way->folder);
}

/* Who joins has the key from the user: the job's agents alone would know one that is made here. */
static even_status find_join_key(const even_job_options *options, even_job_way *way) {
  if (options->max_ranks == 0) {
    return EVEN_OK;
  }
  if (options->launched == NULL && options->estate == NULL) {
    EVEN_TRY(even_job_key_read(way->key));
  }
  if (way->key[0] == '\0' && options->estate == NULL) {
    (void)even_fail(EVEN_ERR_USAGE, "--max-ranks lets hosts join that have the job's key, and there is none");
    return even_error_fix("openssl rand -hex %d > key; chmod 600 key; EVENSTEP_JOB_KEY_FILE=key, here and there",
                          EVEN_TLS_KEY_BYTES);
  }
  return EVEN_OK;
}

/* One, unless the user says otherwise: then the loss of a host loses none. */
static int memory_copies(const even_job_options *options) {
  int64_t wanted = options->memory_copies >= 0 ? options->memory_copies : 1;
  return options->checkpoint_memory > 0 ? (int)wanted : 0;
}

/* Also unasked, but for processes that something else started, which starts them again. */
static bool replaces_unasked(const even_job_options *options, size_t count) {
  return !options->keep_leader && !options->replace_leader && options->witness == NULL && count >= 3 &&
         options->launched == NULL && options->estate == NULL && even_voter_library() != NULL;
}

bool even_job_replaces_leader(const even_job_options *options) {
  size_t hosts = 1;
  for (const char *comma = strchr(options->hosts, ','); comma != NULL; comma = strchr(comma + 1, ',')) {
    hosts++;
  }
  return options->replace_leader || options->witness != NULL || replaces_unasked(options, hosts);
}

static even_status reach(const even_job_options *options, const even_host_wish *wishes, size_t count, size_t word_count,
                         char **words, even_job_setup *setup) {
  even_job_way *way = &setup->way;
  double patience = 0;
  double majority = 0;
  double least = 0;
  double silence = 0;
  even_lost_host lost = EVEN_LOST_GO_ON;
  EVEN_TRY(read_lost_host(&lost));
  EVEN_TRY(even_job_patience(&patience));
  EVEN_TRY(read_silence(options, &silence));
  EVEN_TRY(read_majority_patience(options->estate == NULL ? silence : even_socket_silence() * 1e-3, &majority));
  EVEN_TRY(read_least_patience(&least));
  bool unasked = replaces_unasked(options, count);
  bool replaces = options->replace_leader || options->witness != NULL || unasked;
  EVEN_TRY(replaces && options->estate == NULL ? check_majority_patience(silence, majority) : EVEN_OK);
  EVEN_TRY(even_job_find_way(options, way));
  EVEN_TRY(find_join_key(options, way));
  bool is_file = !options->module && (!options->no_python || strchr(words[0], '/') != NULL);
  const even_hosts_params params = {.size = sizeof params,
                                    .hosts = wishes,
                                    .count = count,
                                    .shell = way->shell == NULL ? NULL : way->words,
                                    .rendezvous = way->rendezvous.path.data,
                                    .unnamed = options->launched != NULL && options->launched->job[0] == '\0',
                                    .returns = options->launched != NULL && options->launched->returns,
                                    .restarts = options->launched != NULL && options->legacy != NULL,
                                    .key = way->key[0] == '\0' ? NULL : way->key,
                                    .port = way->rendezvous.port != 0 ? way->rendezvous.port : (int)options->join_port,
                                    .program = way->program.data,
                                    .address = options->address,
                                    .folder = way->folder.data,
                                    .script = is_file ? words[0] : NULL,
                                    .python = options->no_python ? NULL : setup->python.data,
                                    .profile = even_job_profile_path(options),
                                    .words = (const char *const *)words + 1,
                                    .word_count = word_count - 1,
                                    .patience_seconds = patience,
                                    .majority_seconds = majority,
                                    .silence_seconds = silence,
                                    .replaces_leader = replaces,
                                    .replaces_unasked = unasked,
                                    .copies = (int)options->checkpoint_copies,
                                    .memory_copies = memory_copies(options),
                                    .least_ranks = (int)options->min_ranks,
                                    .lost = lost,
                                    .least_seconds = least,
                                    .most_ranks = (int)options->max_ranks,
                                    .estate = options->estate,
                                    .before = options->legacy};
  return even_hosts_open(&params, &setup->hosts);
}

/* Where the ranks of a host begin: one behind the other, or as they were numbered under another leader. */
static size_t first_of(const even_hosts *hosts, size_t host, size_t next) {
  long first = even_hosts_first_rank(hosts, host);
  return first < 0 ? next : (size_t)first;
}

/* Of ranks that were numbered under another leader: those of spares, and those that no host has. */
static void name_free(even_job_setup *setup, size_t rank) {
  even_device *device = &setup->devices.items[rank];
  if (rank >= setup->first && rank < setup->first + setup->local) {
    return;
  }
  *device = (even_device){.numa_node = -1, .cuda_index = -1, .efficiency = -1};
  (void)snprintf(device->name, sizeof device->name, "free:%zu", rank);
  (void)snprintf(setup->names[rank], EVEN_HOSTS_NAME, "free");
  setup->labels[rank] = setup->names[rank];
}

even_status even_job_add_devices(even_job_setup *setup) {
  even_device_list *all = &setup->devices;
  even_device *items = NULL;
  if (even_hosts_first_rank(setup->hosts, 0) >= 0) {
    even_device_list held;
    EVEN_TRY(even_hosts_held_devices(setup->hosts, &held));
    even_device_list_free(all);
    *all = held;
  }
  size_t count = all->count;
  setup->local = all->count;
  for (size_t host = 1; host < even_hosts_count(setup->hosts); host++) {
    count += even_hosts_devices(setup->hosts, host)->count;
  }
  size_t held = even_hosts_held_places(setup->hosts);
  size_t room = count > held ? count : held;
  EVEN_TRY(EVEN_NEW_ARRAY(&items, room));
  setup->first = first_of(setup->hosts, 0, 0);
  memcpy(&items[setup->first], all->items, setup->local * sizeof *items); /* the others' own no memory */
  even_free(all->items);
  all->items = items;
  all->count = held > 0 ? held - even_hosts_held_spares(setup->hosts) : count;
  EVEN_TRY(EVEN_NEW_ARRAY(&setup->labels, room));
  EVEN_TRY(EVEN_NEW_ARRAY(&setup->names, room));
  for (size_t rank = 0; rank < held; rank++) {
    name_free(setup, rank);
  }
  size_t next = setup->local;
  for (size_t host = 1; host < even_hosts_count(setup->hosts); host++) {
    const even_device_list *list = even_hosts_devices(setup->hosts, host);
    size_t first = first_of(setup->hosts, host, next);
    for (size_t rank = first; rank < first + list->count; rank++) {
      items[rank] = list->items[rank - first];
      (void)snprintf(setup->names[rank], EVEN_HOSTS_NAME, "%s", even_hosts_name(setup->hosts, host));
      setup->labels[rank] = setup->names[rank];
    }
    next += list->count;
  }
  return EVEN_OK;
}

static even_status check_copies(const char *option, int64_t copies, size_t hosts) {
  if (copies <= (int64_t)hosts - 1) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_USAGE, "%s %lld, and there are %zu other hosts", option, (long long)copies, hosts - 1);
  return even_error_fix("give at most so many");
}

even_status even_job_reach_hosts(const even_job_options *options, int ranks, size_t word_count, char **words,
                                 even_job_setup *setup) {
  even_host_wish *wishes = NULL;
  size_t count = 0;
  setup->local = setup->devices.count;
  if (options->hosts == NULL) {
    EVEN_TRY(check_alone(options));
  }
  if (options->hosts == NULL && options->max_ranks == 0) {
    return EVEN_OK;
  }
  EVEN_TRY(even_job_check_hosts(options));
  even_status status = options->launched != NULL ? make_wishes(options->launched, ranks, &wishes, &count)
                       : options->hosts == NULL  ? make_own_wish(ranks, &wishes, &count)
                                                 : even_job_read_hosts(options->hosts, ranks, &wishes, &count);
  if (status == EVEN_OK && options->launched == NULL && options->estate == NULL) {
    warn_of_order(wishes, count);
  }
  if (status == EVEN_OK && options->witness != NULL) {
    status = add_witness(options, &wishes, &count);
  }
  if (status == EVEN_OK && options->replace_leader && options->estate == NULL &&
      (count < 3 || options->launched != NULL)) {
    status = even_fail(EVEN_ERR_USAGE, "--replace-leader is of three hosts and more that --hosts names");
    (void)even_error_fix(
        "of two hosts nobody knows which one is cut off: --witness names a third machine, which votes");
  }
  if (status == EVEN_OK && options->estate == NULL) {
    status = check_copies("--checkpoint-copies", options->checkpoint_copies, count);
  }
  if (status == EVEN_OK && options->estate == NULL) {
    status = check_copies("--memory-copies", options->memory_copies, count);
  }
  if (status == EVEN_OK && (count > 1 || options->max_ranks > 0)) { /* this host alone is a job of one host */
    status = reach(options, wishes, count, word_count, words, setup);
    if (status == EVEN_OK && (options->estate != NULL || options->legacy != NULL) && options->set_aside) {
      status = even_job_inherit_aside(options, setup);
    }
  }
  if (status == EVEN_OK && setup->hosts != NULL) {
    status = even_job_add_devices(setup);
  }
  even_free(wishes);
  return status;
}

/* That have ranks: one may not have come to an agent that goes on after a killed one. */
static size_t count_hosts(const even_hosts *hosts) {
  size_t count = 1;
  for (size_t i = 1; i < even_hosts_count(hosts); i++) {
    count += even_hosts_devices(hosts, i)->count > 0;
  }
  return count;
}

void even_job_name_hosts(const even_job_setup *setup, even_text *out) {
  size_t waiting = setup->spares - setup->kept;
  size_t ranks = even_job_ranks_known(setup) - waiting;
  size_t count = count_hosts(setup->hosts);
  even_text_format(out, "%zu rank%s on %zu host%s: %s %zu", ranks, ranks == 1 ? "" : "s", count, count == 1 ? "" : "s",
                   even_hosts_name(setup->hosts, 0), setup->local);
  for (size_t i = 1; i < even_hosts_count(setup->hosts); i++) {
    size_t its = even_hosts_devices(setup->hosts, i)->count;
    if (its > 0) {
      even_text_format(out, ", %s %zu", even_hosts_name(setup->hosts, i), its);
    }
  }
  if (waiting > 0) {
    even_text_format(out, "; %zu spare%s", waiting, waiting == 1 ? "" : "s");
  }
}
