/* What launchers say in the environment of the processes that they start. */
#include "orchestrator/launched.h"

#include "base/fail.h"
#include "os/file.h"
#include "os/process_stat.h"
#include "os/signals.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef char *asked_variable(const char *name);

/* The first of them that tells both. Slurm comes last: mpirun may run inside an allocation of it, which several may
 * share: its name is none of theirs. */
static const struct launcher {
  const char *by;
  const char *place;
  const char *count;
  const char *job[3]; /* names of the job, where EVENSTEP_HOST_JOB says none; the first that is there */
} launchers[] = {
    {"EVENSTEP_HOST_RANK", "EVENSTEP_HOST_RANK", "EVENSTEP_HOST_COUNT", {NULL, NULL, NULL}},
    {"Open MPI",
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"}},
    {"MPICH", "PMI_RANK", "PMI_SIZE", {"PMI_JOBID", NULL, NULL}},
    {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", {"SLURM_JOB_ID", "SLURM_JOBID", NULL}},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", {"SLURM_JOB_ID", "SLURM_JOBID", NULL}},
};

static const char *asked(asked_variable *variable, const char *name) {
  const char *value = name == NULL ? NULL : variable(name);
  return value == NULL || value[0] == '\0' ? NULL : value;
}

static bool read_number(const char *text, int *out) {
  char *end = NULL;
  errno = 0;
  long value = text == NULL ? -1 : strtol(text, &end, 10);
  if (errno != 0 || text == NULL || end == text || *end != '\0' || value < 0 || value > 1000000) {
    return false;
  }
  *out = (int)value;
  return true;
}

/* A name that a file may have. */
static void add_word(even_launched *out, const char *word) {
  static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  size_t at = strlen(out->job);
  for (; *word != '\0' && at + 1 < sizeof out->job; word++) {
    out->job[at++] = strchr(allowed, *word) != NULL ? *word : '-';
  }
  out->job[at] = '\0';
}

static void name_job(asked_variable *variable, const struct launcher *launcher, even_launched *out) {
  static const char *const of_step[] = {"SLURM_STEP_ID", "SLURM_RESTART_COUNT"};
  size_t which = 0;
  const char *own = asked(variable, "EVENSTEP_HOST_JOB");
  if (own != NULL) {
    add_word(out, own);
    return;
  }
  while (which < 3 && asked(variable, launcher->job[which]) == NULL) {
    which++;
  }
  if (which == 3) {
    return;
  }
  add_word(out, asked(variable, launcher->job[which]));
  bool slurm = strncmp(launcher->job[which], "SLURM_", 6) == 0;
  for (size_t i = 0; slurm && i < 2; i++) {
    const char *word = asked(variable, of_step[i]);
    add_word(out, word == NULL ? "" : ".");
    add_word(out, word == NULL ? "" : word);
  }
}

/* Where each host has one process their names are known; what cannot be read is not needed. */
static void name_hosts(asked_variable *variable, even_launched *out) {
  static const char *const lists[] = {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"};
  for (size_t i = 0; i < 3 && out->hosts.count == 0; i++) {
    const char *list = asked(variable, lists[i]);
    if (list != NULL &&
        (even_hostlist_expand(list, &out->hosts) != EVEN_OK || out->hosts.count != (size_t)out->count)) {
      even_error_clear();
      even_hostlist_free(&out->hosts);
    }
  }
}

static even_status check(const even_launched *launched, const struct launcher *launcher) {
  if (launched->count >= 1 && launched->place < launched->count && launched->count <= EVEN_HOSTS_MOST) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_USAGE, "--hosts auto: %s is %d and %s is %d", launcher->place, launched->place,
                  launcher->count, launched->count);
  return even_error_fix("start it once a host (srun --ntasks-per-node=1, mpirun --map-by node), on %d hosts at most",
                        EVEN_HOSTS_MOST);
}

/* The place of a shell that srun started with a terminal, which what is typed there inherits: it stands for no host.
 * (What a further srun starts there inherits the variables of the terminal, too, but not the terminal; Hydra's
 * processes have MPI_LOCALRANKID.) */
static bool is_of_a_terminals_shell(asked_variable *variable, const struct launcher *launcher) {
  bool srun = strcmp(launcher->by, "Slurm") == 0 ||
              (strcmp(launcher->by, "MPICH") == 0 && asked(variable, "MPI_LOCALRANKID") == NULL);
  bool terminal = asked(variable, "SLURM_PTY_PORT") != NULL || asked(variable, "SLURM_PTY_WIN_COL") != NULL;
  return srun && terminal && even_process_is_typed();
}

even_status even_launched_find(char *(*variable)(const char *name), even_launched *out) {
  *out = (even_launched){.by = ""};
  for (size_t i = 0; i < sizeof launchers / sizeof launchers[0]; i++) {
    const struct launcher *launcher = &launchers[i];
    if (!read_number(asked(variable, launcher->place), &out->place) ||
        !read_number(asked(variable, launcher->count), &out->count)) {
      continue;
    }
    if (is_of_a_terminals_shell(variable, launcher)) {
      (void)even_fail(EVEN_ERR_USAGE, "--hosts auto: this was typed in a shell that srun has started (srun --pty)");
      return even_error_fix(
          "start it once a host from there: srun --overlap --ntasks-per-node=1 evenstep run --hosts auto …; or leave "
          "--hosts out, for ranks on this host alone");
    }
    out->by = launcher->by;
    out->returns = i == 0;
    if (strcmp(out->by, "Slurm") == 0 && asked(variable, "SLURM_STEP_ID") == NULL) {
      (void)even_fail(EVEN_ERR_USAGE, "--hosts auto: this is no process of srun's, but a batch script's own");
      return even_error_fix("start it once a host: srun --ntasks-per-node=1 evenstep run --hosts auto …");
    }
    EVEN_TRY(check(out, launcher));
    name_job(variable, launcher, out);
    name_hosts(variable, out);
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_USAGE, "--hosts auto: nothing here says which host of how many this is");
  return even_error_fix(
      "start it once a host by srun or mpirun, or set EVENSTEP_HOST_RANK (from 0) and EVENSTEP_HOST_COUNT on each");
}

void even_launched_free(even_launched *launched) {
  even_hostlist_free(&launched->hosts);
}

void even_launched_forget(void) {
  static const char *const prefixes[] = {"OMPI_",
                                         "PMIX_",
                                         "PMI_",
                                         "PRTE_",
                                         "MPI_LOCAL",
                                         "HYDI_",
                                         "HYDRA_",
                                         "MPIR_",
                                         "EVENSTEP_HOST_RANK=",
                                         "EVENSTEP_HOST_COUNT="};
  size_t at = 0;
  while (environ[at] != NULL) {
    char name[128];
    size_t length = strcspn(environ[at], "=");
    bool its = false;
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
      its = its || strncmp(environ[at], prefixes[i], strlen(prefixes[i])) == 0;
    }
    if (its && length < sizeof name) {
      memcpy(name, environ[at], length);
      name[length] = '\0';
      (void)unsetenv(name); /* what follows moves up */
    } else {
      at++;
    }
  }
}

/* ---- the key ---- */

static even_status take_key(const char *from, const char *text, char digits[EVEN_KEY_DIGITS + 1]) {
  unsigned char key[EVEN_TLS_KEY_BYTES];
  size_t length = strcspn(text, "\r\n");
  bool whole = length == EVEN_KEY_DIGITS && text[length + strspn(text + length, "\r\n")] == '\0';
  if (whole) {
    memcpy(digits, text, length);
    digits[length] = '\0';
  }
  even_status status = whole ? even_tls_key_read(digits, key) : EVEN_ERR_INPUT;
  explicit_bzero(key, sizeof key);
  if (status != EVEN_OK) {
    explicit_bzero(digits, EVEN_KEY_DIGITS + 1);
    (void)even_fail(EVEN_ERR_INPUT, "%s is no key of %d hexadecimal digits", from, EVEN_KEY_DIGITS);
    return even_error_fix("make one, the same for all hosts: openssl rand -hex %d", EVEN_TLS_KEY_BYTES);
  }
  return EVEN_OK;
}

even_status even_job_key_read(char digits[EVEN_KEY_DIGITS + 1]) {
  char *given = getenv("EVENSTEP_JOB_KEY");
  const char *path = getenv("EVENSTEP_JOB_KEY_FILE");
  even_text text = EVEN_TEXT_EMPTY;
  digits[0] = '\0';
  if (given != NULL && given[0] != '\0') {
    even_status status = take_key("EVENSTEP_JOB_KEY", given, digits);
    explicit_bzero(given, strlen(given)); /* also for who reads this process's environment */
    (void)unsetenv("EVENSTEP_JOB_KEY");
    return status;
  }
  if (path == NULL || path[0] == '\0') {
    return EVEN_OK;
  }
  even_status status = even_file_read_private(path, 4096, &text);
  if (status == EVEN_OK) {
    status = take_key(path, even_text_string(&text), digits);
  } else {
    (void)even_error_prefix("EVENSTEP_JOB_KEY_FILE");
    (void)even_error_fix("a copy of the file that all hosts of the job have: openssl rand -hex %d > %s; chmod 600 %s",
                         EVEN_TLS_KEY_BYTES, path, path);
  }
  if (text.data != NULL) {
    explicit_bzero(text.data, text.length);
  }
  even_text_free(&text);
  return status;
}
