"""Scripts that the server runs in one step."""

from typing import Final

RETURNED: Final = "returned"
"""The group member to which returned entries are assigned, with their attempts."""

TAKE: Final = """
-- Takes entries for a member, first those that others have left. Members share entries
-- that are idle for a lease. Without sharing, one member at a time reads: the shards of
-- a topic are dealt out to those that are alive, the oldest first, and to those that
-- step aside ('~') if there are no others. A member is alive while its process is
-- subscribed to its channel, and it was at work within its lease.
local key, group, me, channel, prefix = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lease, limit, shard = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local is_shared, is_forced = ARGV[8] == 'shared', ARGV[8] == 'forced'
local function is_present(name)
  return redis.call('PUBSUB', 'NUMSUB', name)[2] > 0
end
local function read(from, count)
  return redis.pcall('XREADGROUP', 'GROUP', group, me, 'COUNT', count,
    'STREAMS', key, from)
end

-- Finds nothing, but is a sign of life.
local seen = read('18446744073709551615-0', 1)
if seen and seen.err then return seen end

local readers, others, has_left = {}, 0, is_shared
if not is_shared then
  if not is_present(channel) then return {channel, 0} end
  local gone, holder = {}, nil
  readers[1], readers[channel] = channel, true
  for _, member in ipairs(redis.call('XINFO', 'CONSUMERS', key, group)) do
    local name, pending, idle = member[2], member[4], member[6]
    local its_channel = string.gsub(name, '/%d+$', '')
    local has_channel = string.sub(name, 1, #prefix) == prefix
    local is_gone = has_channel
      and (its_channel == channel or not is_present(its_channel))
    if name == 'returned' or name == 'left' then
      has_left = has_left or pending > 0
    elseif name ~= me and (is_gone or idle >= lease) then
      if pending > 0 then
        gone[#gone + 1] = name
      elseif is_gone then
        redis.call('XGROUP', 'DELCONSUMER', key, group, name)
      end
    elseif name ~= me then
      if has_channel and not readers[its_channel] then
        readers[#readers + 1], readers[its_channel] = its_channel, true
      end
      if pending > 0 and is_forced and has_channel then
        gone[#gone + 1] = name
      elseif pending > 0 then
        holder = name
      end
    end
  end
  table.sort(readers)
  local willing = 0
  for _, name in ipairs(readers) do
    if string.sub(name, #prefix + 1, #prefix + 1) ~= '~' then willing = willing + 1 end
  end
  if willing == 0 then willing = #readers end
  local reader = readers[(shard - 1) % willing + 1]
  if reader ~= channel then return {reader, 0} end
  if holder then return {holder, 1} end
  others = #readers - 1
  -- All at once, so that none of them continues with a part.
  for _, name in ipairs(gone) do
    has_left = true
    repeat
      local page = redis.call('XPENDING', key, group, '-', '+', 1000, name)
      for _, entry in ipairs(page) do
        redis.call('XCLAIM', key, group, 'left', 0, entry[1], 'RETRYCOUNT', entry[4],
          'JUSTID')
      end
    until #page == 0
  end
end

local entries, start, last = {}, '-', ''
while has_left and #entries < limit do
  local page = redis.call('XPENDING', key, group, 'IDLE', is_shared and lease or 0,
    start, '+', 1000)
  for _, entry in ipairs(page) do
    local id, name, times = entry[1], entry[2], entry[4]
    if #entries < limit and (is_shared or name ~= me) then
      local claimed = redis.call('XCLAIM', key, group, me, 0, id)[1]
      if claimed then
        entries[#entries + 1] = {id, claimed[2], times, name == 'returned' and 1 or 0}
      else -- it was trimmed
        redis.call('XACK', key, group, id)
      end
    end
  end
  if #page < 1000 then break end
  start = '(' .. page[#page][1]
end

if #entries < limit and not is_shared then
  local new = read('>', limit - #entries)
  if new and new.err then return new end
  for _, entry in ipairs(new and new[1][2] or {}) do
    entries[#entries + 1] = {entry[1], entry[2], 0, 0}
    last = entry[1]
  end
  if #entries == limit then
    last = ''
  elseif last == '' then
    for _, found in ipairs(redis.call('XINFO', 'GROUPS', key)) do
      if found[2] == group then last = found[8] end
    end
  end
end
return {'', others, entries, last}
"""

KEEP: Final = """
-- Keeps entries with a member that holds them, under this name or an earlier one.
-- Returns those that it holds no longer, and whether another member does.
local key, group, me, channel, lost = KEYS[1], ARGV[1], ARGV[2], ARGV[3], {}
for i = 4, #ARGV do
  local found = redis.call('XPENDING', key, group, ARGV[i], ARGV[i], 1)[1]
  if found and string.gsub(found[2], '/%d+$', '') == channel then
    redis.call('XCLAIM', key, group, me, 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = {ARGV[i], found and 1 or 0}
  end
end
return lost
"""

LEAVE: Final = """
-- Returns all entries of a member, with their failed attempts, and ends its membership.
local key, group, channel, attempts = KEYS[1], ARGV[1], ARGV[2], {}
for i = 4, #ARGV, 2 do attempts[ARGV[i]] = ARGV[i + 1] end
for _, member in ipairs(redis.call('XINFO', 'CONSUMERS', key, group)) do
  local name = member[2]
  if string.gsub(name, '/%d+$', '') == channel then
    repeat
      local page = redis.call('XPENDING', key, group, '-', '+', 1000, name)
      for _, entry in ipairs(page) do
        redis.call('XCLAIM', key, group, 'returned', 0, entry[1], 'IDLE', ARGV[3],
          'RETRYCOUNT', attempts[entry[1]] or 0, 'JUSTID')
      end
    until #page == 0
    redis.call('XGROUP', 'DELCONSUMER', key, group, name)
  end
end
"""
