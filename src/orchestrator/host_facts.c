/* What a host has of what a script needs, and how two hosts differ in it. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "orchestrator/host_agent.h"
#include "os/dialogue.h"
#include "os/entries.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/host.h"
#include "os/path.h"

#include <evenstep/checkpoint.h>
#include <evenstep/version.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MOST_FILES = 4096, FILE_BYTES = 16 << 20, PROBE_MS = 60000, DIFFERENCES = 4 };

/* Without importing anything large: versions from the packages' own notes, the package's sources by a checksum. */
static const char probe[] =
    "import hashlib, json, pathlib, sys\n"
    "import importlib.metadata as m, importlib.util as u\n"
    "r = {'python': '%d.%d.%d' % sys.version_info[:3]}\n"
    "try: r['torch'] = m.version('torch')\n"
    "except Exception: r['torch'] = 'none'\n"
    "try:\n"
    "    f = pathlib.Path(u.find_spec('evenstep').origin).parent\n"
    "    h = hashlib.sha256()\n"
    "    for p in sorted(f.glob('*.py')): h.update(p.name.encode() + p.read_bytes())\n"
    "    r['package'] = h.hexdigest()[:16]\n"
    "except Exception: r['package'] = 'none'\n"
    "print(json.dumps(r))\n";

static even_status ask_python(const char *python, even_text *answer) {
  char option[] = "-c";
  char script[sizeof probe];
  char *arguments[] = {(char *)python, option, script, NULL};
  const char *line = NULL;
  even_dialogue dialogue;
  memcpy(script, probe, sizeof probe);
  EVEN_TRY(even_dialogue_start(arguments, &dialogue));
  even_status status = even_dialogue_hear(&dialogue, PROBE_MS, &line);
  if (status == EVEN_OK && line != NULL && line[0] == '{') {
    even_text_add(answer, line);
    status = even_text_status(answer);
  } else if (status == EVEN_OK) {
    char complaint[200];
    even_dialogue_complaint(&dialogue, complaint, sizeof complaint);
    status = even_fail(EVEN_ERR_INPUT, "%s says nothing of itself: %s", python, complaint);
  }
  even_dialogue_end(&dialogue);
  return status;
}

/* ---- files ---- */

static const char unreadable[] = "unreadable";

typedef struct file_search {
  const char *folder;
  even_json *json;
  int found;
} file_search;

static void add_file(file_search *search, const char *name) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text content = EVEN_TEXT_EMPTY;
  char sum[24];
  even_text_format(&path, "%s/%s", search->folder, name);
  if (even_text_status(&path) == EVEN_OK && even_file_read(path.data, FILE_BYTES, &content) == EVEN_OK) {
    (void)snprintf(sum, sizeof sum, "%016llx",
                   (unsigned long long)even_checkpoint_checksum(even_text_string(&content), content.length));
    even_json_string(search->json, name, sum);
  } else {
    even_json_string(search->json, name, unreadable);
    even_error_clear();
  }
  even_text_free(&path);
  even_text_free(&content);
}

/* Hidden ones cannot be imported: editors' locks are such. */
static bool is_source(const char *name) {
  size_t length = strlen(name);
  return length > 3 && name[0] != '.' && strcmp(name + length - 3, ".py") == 0;
}

static bool look_at(void *context, const char *name) {
  file_search *search = context;
  if (is_source(name)) {
    add_file(search, name);
    search->found++;
  }
  return search->found < MOST_FILES;
}

/* The script's own folder is what Python imports from first. */
static void add_files(even_json *json, const even_host_needs *needs) {
  even_text folder = EVEN_TEXT_EMPTY;
  const char *slash = needs->script == NULL ? NULL : strrchr(needs->script, '/');
  if (needs->script != NULL && needs->script[0] == '/') {
    even_text_append(&folder, needs->script, (size_t)(slash - needs->script));
    even_text_add(&folder, "/");
  } else {
    even_text_format(&folder, "%s/%.*s", needs->folder, slash == NULL ? 0 : (int)(slash - needs->script),
                     slash == NULL ? "" : needs->script);
  }
  file_search search = {.folder = even_text_string(&folder), .json = json};
  const char *own = needs->script == NULL ? NULL : slash == NULL ? needs->script : slash + 1;
  even_json_object(json, "files");
  if (even_text_status(&folder) == EVEN_OK && even_folder_each(search.folder, look_at, &search) != EVEN_OK) {
    even_error_clear(); /* it is not there: no file of it is */
  } else if (own != NULL && !is_source(own)) {
    add_file(&search, own);
  }
  even_json_object_end(json);
  even_text_free(&folder);
}

size_t even_host_places(const even_device_list *own) {
  even_device_list all = {NULL, 0};
  bool gpus = own->count > 0 && own->items[0].kind == EVEN_DEVICE_CUDA;
  double cores = 0;
  if (own->count == 0 || gpus) {
    if (even_device_select(NULL, 0, &all) != EVEN_OK) {
      even_error_clear();
      return own->count;
    }
    own = &all;
    gpus = all.count > 0 && all.items[0].kind == EVEN_DEVICE_CUDA;
  }
  for (size_t i = 0; i < own->count; i++) {
    cores += own->items[i].cores;
  }
  size_t places = gpus ? own->count : (size_t)(cores + 0.01); /* thirds of a core add up to less */
  even_device_list_free(&all);
  return places;
}

void even_host_facts_add_devices(even_json *json, const even_device_list *devices) {
  even_json_array(json, "devices");
  for (size_t i = 0; i < devices->count; i++) {
    const even_device *device = &devices->items[i];
    even_json_object(json, NULL);
    even_json_string(json, "name", device->name);
    even_json_string(json, "model", device->model);
    even_json_integer(json, "kind", device->kind);
    even_json_number(json, "cores", device->cores);
    even_json_unsigned(json, "memory_bytes", device->memory_bytes);
    even_json_object_end(json);
  }
  even_json_array_end(json);
}

even_status even_host_facts_read(const even_host_needs *needs, const even_device_list *devices, even_text *out) {
  even_text answer = EVEN_TEXT_EMPTY;
  even_host_names names;
  char identity[160];
  even_json json = even_json_begin(out, 0);
  EVEN_TRY(even_host_names_read(&names));
  even_json_object(&json, NULL);
  even_json_string(&json, "node", names.host);
  even_host_identity(identity, sizeof identity);
  even_json_string(&json, "identity", identity);
  even_json_string(&json, "evenstep", even_version());
  even_json_string(&json, "machine", names.architecture);
  even_json_bool(&json, "folder", even_path_is_folder(needs->folder));
  if (needs->python != NULL) {
    if (ask_python(needs->python, &answer) == EVEN_OK) {
      even_json_raw(&json, "packages", even_text_string(&answer));
    } else {
      even_json_string(&json, "trouble", even_error_last()->what);
      even_error_clear();
    }
  }
  add_files(&json, needs);
  if (devices != NULL) {
    even_host_facts_add_devices(&json, devices);
    even_json_unsigned(&json, "places", even_host_places(devices));
  }
  even_json_object_end(&json);
  even_text_free(&answer);
  return even_text_status(out);
}

/* ---- comparing ---- */

/* Where what a host says of itself can be read at all. */
static bool is_of_form(const json_t *facts) {
  return json_is_object(facts) && json_is_object(json_object_get(facts, "files")) &&
         json_is_boolean(json_object_get(facts, "folder"));
}

typedef struct differences {
  even_text words;
  int count;
} differences;

static void EVEN_PRINTF(2, 3) add(differences *all, const char *format, ...) {
  char words[200];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(words, sizeof words, format, arguments);
  va_end(arguments);
  if (all->count++ < DIFFERENCES) {
    even_text_format(&all->words, "%s%s", all->count > 1 ? "; " : "", words);
  }
}

static void compare_packages(const json_t *ours, const json_t *theirs, differences *all) {
  static const char *const names[] = {"python", "torch", "package"};
  static const char *const words[] = {"Python", "torch", "the evenstep package (by its sources)"};
  for (size_t i = 0; i < 3; i++) {
    const char *mine = even_json_text(ours, names[i]);
    const char *other = even_json_text(theirs, names[i]);
    if (strcmp(mine, other) != 0) {
      add(all, "%s is %s there and %s here", words[i], other, mine);
    }
  }
}

static bool is_unreadable(const json_t *sum) {
  return json_is_string(sum) && strcmp(json_string_value(sum), unreadable) == 0;
}

static void compare_files(const json_t *ours, const json_t *theirs, differences *all) {
  const char *name = NULL;
  json_t *sum = NULL;
  json_object_foreach((json_t *)ours, name, sum) {
    const json_t *other = json_object_get(theirs, name);
    if (other == NULL) {
      add(all, "%s is not there", name);
    } else if (is_unreadable(sum) || is_unreadable(other)) {
      add(all, "%s cannot be read %s", name, is_unreadable(other) ? "there" : "here");
    } else if (!json_equal(sum, (json_t *)other)) {
      add(all, "%s is another one there", name);
    }
  }
  json_object_foreach((json_t *)theirs, name, sum) {
    if (json_object_get(ours, name) == NULL) {
      add(all, "%s is there alone", name);
    }
  }
}

even_status even_host_facts_compare(const json_t *ours, const json_t *theirs, const char *name, const char *folder) {
  differences all = {EVEN_TEXT_EMPTY, 0};
  if (!is_of_form(theirs)) {
    return even_fail(EVEN_ERR_INPUT, "host %s: what it says of itself cannot be read", name);
  }
  if (!json_is_true(json_object_get(theirs, "folder"))) {
    (void)even_fail(EVEN_ERR_MISMATCH, "host %s has no folder %s, in which the ranks run", name, folder);
    return even_error_fix("copy it there: rsync -a %s/ %s:%s/, or share it (NFS)", folder, name, folder);
  }
  const char *trouble = even_json_text(theirs, "trouble");
  if (trouble[0] != '\0') {
    (void)even_fail(EVEN_ERR_MISMATCH, "host %s: %s", name, trouble);
    return even_error_fix("install the same Python there, or name one that all hosts have with --python");
  }
  if (strcmp(even_json_text(ours, "machine"), even_json_text(theirs, "machine")) != 0) {
    add(&all, "it is %s, this host %s", even_json_text(theirs, "machine"), even_json_text(ours, "machine"));
  }
  compare_packages(json_object_get(ours, "packages"), json_object_get(theirs, "packages"), &all);
  int packages = all.count;
  compare_files(json_object_get(ours, "files"), json_object_get(theirs, "files"), &all);
  even_status status = even_text_status(&all.words);
  if (status == EVEN_OK && all.count > 0) {
    char more[48] = "";
    if (all.count > DIFFERENCES) {
      (void)snprintf(more, sizeof more, "; and %d more", all.count - DIFFERENCES);
    }
    status = even_fail(EVEN_ERR_MISMATCH, "host %s differs from this one: %.480s%s", name, even_text_string(&all.words),
                       more);
    if (packages > 0) {
      (void)even_error_fix("install the same versions on all hosts");
    } else {
      (void)even_error_fix(
          "let the script's folder be the same there: rsync -a --delete --include='*.py' …, or share it (NFS)");
    }
  }
  even_text_free(&all.words);
  return status;
}

even_status even_host_facts_devices(const json_t *facts, even_device_list *out) {
  const json_t *list = json_object_get(facts, "devices");
  *out = (even_device_list){NULL, 0};
  size_t count = json_array_size(list);
  if (count < 1 || count > EVEN_TELEMETRY_MOST_RANKS) {
    return even_fail(EVEN_ERR_INPUT, "%zu devices", count);
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&out->items, count));
  out->count = count;
  for (size_t i = 0; i < count; i++) {
    const json_t *item = json_array_get(list, i);
    even_device *device = &out->items[i];
    (void)snprintf(device->name, sizeof device->name, "%s", even_json_text(item, "name"));
    (void)snprintf(device->model, sizeof device->model, "%s", even_json_text(item, "model"));
    device->kind =
        json_integer_value(json_object_get(item, "kind")) == EVEN_DEVICE_CUDA ? EVEN_DEVICE_CUDA : EVEN_DEVICE_CPU;
    device->cores = json_number_value(json_object_get(item, "cores"));
    device->memory_bytes = (uint64_t)json_integer_value(json_object_get(item, "memory_bytes"));
    device->numa_node = device->cuda_index = device->efficiency = -1;
  }
  return EVEN_OK;
}
