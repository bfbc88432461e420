/* What the leader asks hosts of what they have, and whether that fits. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "orchestrator/aside_hosts.h"
#include "orchestrator/estate.h"
#include "orchestrator/hold.h"
#include "orchestrator/host_agent.h"
#include "os/socket.h"

#include <string.h>

/* Hosts that were here when the job began have its data; the command's files may have changed since by its own doing.
 */
static const json_t *data_for(const even_host_agent *agent) {
  const even_hosts *hosts = agent->hosts;
  bool new = agent->index >= hosts->count || agent->came;
  return !hosts->begun || new ? hosts->data : NULL;
}

even_status even_hosts_ask_facts(even_host_agent *agent) {
  const even_hosts_params *params = &agent->hosts->params;
  even_text text = EVEN_TEXT_EMPTY;
  if (agent->witness) {
    agent->fits = true; /* it needs nothing of what the script does */
    return EVEN_OK;
  }
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "folder", params->folder);
  even_json_string(&json, "script", params->script);
  even_json_string(&json, "python", params->python);
  even_json_string(&json, "profile", params->profile);
  even_json_integer(&json, "ranks", agent->wish);
  even_json_integer(&json, "host", (int64_t)agent->index);
  even_json_integer(&json, "silence_ms", even_socket_silence());
  const json_t *data = data_for(agent);
  if (data != NULL) {
    even_json_array(&json, "data");
    for (size_t i = 0; i < json_array_size(data); i++) {
      even_json_string(&json, NULL, json_string_value(json_array_get(data, i)));
    }
    even_json_array_end(&json);
  }
  even_json_object_end(&json);
  return even_link_send_text(agent->link, EVEN_MESSAGE_CHECK, &text, NULL, 0);
}

/* What the command names may be what rank 0 alone writes: that it differs is an error where the user says so. */
static even_status examine_data(even_host_agent *agent, const json_t *facts) {
  const even_hosts *hosts = agent->hosts;
  even_data_check check = EVEN_DATA_TELL;
  EVEN_TRY(even_host_data_check(&check));
  even_status status = even_host_data_compare(json_object_get(hosts->facts, "data"), json_object_get(facts, "data"),
                                              agent->name, !hosts->begun);
  if (status != EVEN_ERR_MISMATCH || check == EVEN_DATA_STRICT) {
    return status;
  }
  even_text_format(&agent->differs, "%s; fix: %s", even_error_last()->what, even_error_last()->fix);
  even_error_clear();
  EVEN_TRY(even_text_status(&agent->differs));
  even_host_data_tell(agent);
  return EVEN_OK;
}

/* Shares do not begin from a profile that cannot be read; that ends nothing: ranks may be running. */
static even_status examine_profile(even_host_agent *agent, const json_t *facts) {
  const char *trouble = json_string_value(json_object_get(facts, "profile_trouble"));
  if (trouble == NULL) {
    return EVEN_OK;
  }
  even_text_format(&agent->differs, "%shost %s: %.480s", agent->differs.length > 0 ? "; " : "", agent->name, trouble);
  EVEN_TRY(even_text_status(&agent->differs));
  even_host_data_tell(agent);
  return EVEN_OK;
}

even_status even_hosts_examine(even_host_agent *agent, const json_t *facts) {
  even_hosts *hosts = agent->hosts;
  const char *trouble = json_string_value(json_object_get(facts, "device_trouble"));
  if (trouble != NULL) {
    return even_fail(EVEN_ERR_DEVICE, "host %s: %.500s", agent->name, trouble);
  }
  EVEN_TRY(even_host_facts_compare(hosts->facts, facts, agent->name, hosts->params.folder));
  even_text_clear(&agent->differs);
  EVEN_TRY(examine_data(agent, facts));
  EVEN_TRY(examine_profile(agent, facts));
  even_device_list devices = {NULL, 0};
  EVEN_TRY(even_host_facts_devices(facts, &devices));
  if (agent->whole.count > 0) {
    even_status status = even_aside_host_cut_again(agent, &devices);
    if (status != EVEN_OK) {
      even_device_list_free(&devices);
      return status;
    }
  }
  if (agent->count != 0 && agent->count != devices.count) {
    even_device_list_free(&devices);
    return even_fail(EVEN_ERR_MISMATCH, "host %s had %zu devices before, and has %zu now", agent->name, agent->count,
                     devices.count);
  }
  even_device_list_free(&agent->devices);
  agent->devices = devices;
  agent->count = devices.count;
  agent->places = (size_t)json_integer_value(json_object_get(facts, "places"));
  return EVEN_OK;
}

even_status even_hosts_read_own_facts(even_hosts *hosts) {
  even_text text = EVEN_TEXT_EMPTY;
  const even_estate *estate = hosts->params.estate;
  if (estate != NULL && even_estate_goes_on(estate)) { /* ranks wait: what this host has is known */
    const char *facts = even_hold_facts(estate->holds);
    return even_json_parse("this host's facts", facts, strlen(facts), &hosts->facts);
  }
  if (estate == NULL) {
    EVEN_TRY(even_host_data_find(hosts->params.folder, hosts->params.words, hosts->params.word_count, &hosts->data));
  }
  const even_host_needs needs = {.folder = hosts->params.folder,
                                 .script = hosts->params.script,
                                 .python = hosts->params.python,
                                 .data = hosts->data};
  even_status status = even_host_facts_read(&needs, NULL, &text);
  if (status == EVEN_OK) {
    status = even_json_parse("this host's facts", text.data, text.length, &hosts->facts);
  }
  even_text_free(&text);
  const char *trouble = status == EVEN_OK ? json_string_value(json_object_get(hosts->facts, "trouble")) : NULL;
  return trouble == NULL ? status : even_fail(EVEN_ERR_INPUT, "%s", trouble);
}
