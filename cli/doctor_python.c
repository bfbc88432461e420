/* Doctor: the interpreter, torch, and this package beside them. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "cli/doctor.h"
#include "cli/python.h"
#include "os/dialogue.h"

#include <evenstep/version.h>
#include <stdio.h>
#include <string.h>

/* Importing torch from a cold disk takes long. */
enum { PROBE_MS = 180000, LEAST_TORCH_MAJOR = 2, LEAST_TORCH_MINOR = 6, LEAST_PYTHON_MINOR = 9 };

/* Runs in any Python 3, with or without torch; the last line that it prints is the answer. */
static const char probe[] =
    "import json, sys\n"
    "r = {'python': '%d.%d.%d' % sys.version_info[:3], 'minor': sys.version_info[1], 'executable': sys.executable}\n"
    "try:\n"
    "    import torch\n"
    "    r['torch'] = str(torch.__version__)\n"
    "    r['cuda'] = torch.version.cuda\n"
    "    r['gpus'] = torch.cuda.device_count()\n"
    "    r['nccl'] = '.'.join(map(str, torch.cuda.nccl.version())) if r['cuda'] else None\n"
    "except BaseException as e:\n"
    "    r['torch_error'] = (type(e).__name__ + ': ' + str(e)).splitlines()[0]\n"
    "try:\n"
    "    import evenstep\n"
    "    r['evenstep'] = str(evenstep.__version__)\n"
    "    r['folder'] = evenstep.__path__[0]\n"
    "except BaseException as e:\n"
    "    r['evenstep_error'] = (type(e).__name__ + ': ' + str(e)).splitlines()[0]\n"
    "print()\n"
    "print(json.dumps(r))\n";

static const char *text_of(const json_t *answer, const char *name) {
  return json_string_value(json_object_get(answer, name));
}

static even_status last_line(even_dialogue *dialogue, even_text *out) {
  for (;;) {
    const char *line = NULL;
    EVEN_TRY(even_dialogue_hear(dialogue, PROBE_MS, &line));
    if (line == NULL) {
      return even_text_status(out);
    }
    even_text_clear(out);
    even_text_add(out, line);
  }
}

static even_status ask(const char *python, json_t **out) {
  char interpreter[4096];
  char option[] = "-c";
  char script[sizeof probe];
  char *arguments[] = {interpreter, option, script, NULL};
  char complaint[256];
  even_dialogue dialogue;
  even_text answer = EVEN_TEXT_EMPTY;
  (void)snprintf(interpreter, sizeof interpreter, "%s", python);
  memcpy(script, probe, sizeof probe);
  EVEN_TRY(even_dialogue_start(arguments, &dialogue));
  even_status status = last_line(&dialogue, &answer);
  even_dialogue_complaint(&dialogue, complaint, sizeof complaint);
  even_dialogue_end(&dialogue);
  if (status == EVEN_OK) {
    status = even_json_parse(python, even_text_string(&answer), answer.length, out);
    if (status != EVEN_OK && complaint[0] != '\0') {
      status = even_fail(EVEN_ERR_INPUT, "%s: %s", python, complaint);
    }
  }
  even_text_free(&answer);
  return status;
}

static void torch_check(even_doctor *doctor, const json_t *answer) {
  static const char get[] = "pip install 'torch>=2.6' (a CPU-only build is enough where there is no GPU)";
  const char *version = text_of(answer, "torch");
  const char *cuda = text_of(answer, "cuda");
  int major = 0;
  int minor = 0;
  if (version == NULL) {
    even_doctor_add(doctor, "torch", EVEN_DOCTOR_MISSING, "nothing can be trained", get, "%s",
                    text_of(answer, "torch_error"));
    return;
  }
  bool old = sscanf(version, "%d.%d", &major, &minor) != 2 || major < LEAST_TORCH_MAJOR ||
             (major == LEAST_TORCH_MAJOR && minor < LEAST_TORCH_MINOR);
  even_doctor_add(doctor, "torch", old ? EVEN_DOCTOR_MISSING : EVEN_DOCTOR_OK,
                  "2.6 is the oldest that Evenstep works with", get, "%s%s%s", version,
                  cuda != NULL ? ", built for CUDA " : ", built without CUDA", cuda != NULL ? cuda : "");
}

static void package_check(even_doctor *doctor, const json_t *answer) {
  static const char get[] = "pip install . in Evenstep's source folder, with this interpreter";
  const char *version = text_of(answer, "evenstep");
  if (version == NULL) {
    even_doctor_add(doctor, "evenstep package", EVEN_DOCTOR_MISSING, "scripts cannot import evenstep", get, "%s",
                    text_of(answer, "evenstep_error"));
  } else if (strcmp(version, even_version()) != 0) {
    even_doctor_add(doctor, "evenstep package", EVEN_DOCTOR_MISSING,
                    "program and package must be of one version: they share formats in memory", get,
                    "%s in %s, but this program is %s", version, text_of(answer, "folder"), even_version());
  } else {
    even_doctor_add(doctor, "evenstep package", EVEN_DOCTOR_OK, NULL, NULL, "%s in %s", version,
                    text_of(answer, "folder"));
  }
}

static void nccl_check(even_doctor *doctor, const json_t *answer) {
  const char *nccl = text_of(answer, "nccl");
  if (nccl != NULL) {
    even_doctor_add(doctor, "NCCL", EVEN_DOCTOR_OK, NULL, NULL, "%s, in torch", nccl);
  } else {
    even_doctor_add(doctor, "NCCL", EVEN_DOCTOR_NOTE, "GPUs have no fast way to exchange gradients",
                    "only with NVIDIA GPUs: install a build of torch for CUDA, which brings it",
                    "this torch has none (not needed without GPUs)");
  }
}

static void answer_check(even_doctor *doctor, const json_t *answer) {
  json_int_t minor = json_integer_value(json_object_get(answer, "minor"));
  even_doctor_add(doctor, "python", minor < LEAST_PYTHON_MINOR ? EVEN_DOCTOR_MISSING : EVEN_DOCTOR_OK,
                  "3.9 is the oldest that Evenstep works with", "install a newer Python 3 and name it with --python",
                  "%s (%s)", text_of(answer, "python"), text_of(answer, "executable"));
  torch_check(doctor, answer);
  package_check(doctor, answer);
  nccl_check(doctor, answer);
}

void even_doctor_python(even_doctor *doctor, const char *wish) {
  even_text python = EVEN_TEXT_EMPTY;
  json_t *answer = NULL;
  even_status status = even_cli_python(wish, &python);
  if (status == EVEN_OK) {
    status = ask(even_text_string(&python), &answer);
  }
  if (status == EVEN_OK) {
    answer_check(doctor, answer);
  } else {
    even_doctor_add(doctor, "python", EVEN_DOCTOR_MISSING, "scripts cannot be run",
                    "apt-get install python3 python3-venv, or name an interpreter with --python", "%s",
                    even_error_last()->what);
  }
  json_decref(answer);
  even_text_free(&python);
}
